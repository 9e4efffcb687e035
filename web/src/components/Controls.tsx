// Pause, resume, the preset of limits, and stop, with the result in words.

import type { NodeStatus } from "../api/status";
import { useRef, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { isPausedByRule } from "../state/ownerPolicy";
import { actionOf, Icon } from "./parts";
import { PauseMenu } from "./PauseMenu";
import { PresetChoice } from "./PresetChoice";
import { StopDialog } from "./StopDialog";

interface Props {
  status: NodeStatus;
  reachable: boolean;
  actions: NodeActions;
  onMessage: (text: string, failed: boolean) => void;
}

export function Controls({ status, reachable, actions, onMessage }: Props) {
  const [busy, setBusy] = useState(false);
  const [asking, setAsking] = useState(false);
  const pauseButton = useRef<HTMLButtonElement>(null);
  const run = async (action: () => Promise<string>) => {
    setBusy(true);
    try {
      onMessage(await action(), false);
    } catch (error) {
      onMessage(error instanceof Error ? error.message : String(error), true);
    } finally {
      setBusy(false);
    }
  };
  const paused = status.state === "paused" && !isPausedByRule(status.owner_policy); // nobody can resume a pause by a rule
  const ending = status.state === "stopping";
  const isOff = busy || !reachable || ending;
  const cannotPause = isOff || status.state === "starting";
  const pauseFor = (seconds: number) => {
    pauseButton.current?.focus(); // the list disappears with the pause, and this button then resumes
    void run(() => actions.pause(seconds));
  };
  return (
    <div class="controls">
      <button
        ref={pauseButton}
        type="button"
        class={`button ${paused ? "button-primary" : ""}`}
        {...actionOf(cannotPause, () => void run(() => (paused ? actions.resume() : actions.pause())))}
      >
        <Icon name={paused ? "play" : "pause"} />
        {paused ? "Resume" : "Pause"}
      </button>
      {!paused && <PauseMenu disabled={cannotPause} onPause={pauseFor} />}
      <PresetChoice startedAt={status.started_at} measuredAt={status.network.line_measured_at} actions={actions} isOff={isOff} run={run} />
      <button type="button" class="button" {...actionOf(isOff, () => setAsking(true))}>
        <Icon name="stop" />
        Stop
      </button>
      <StopDialog
        open={asking}
        couldLose={status.checkpoints.could_lose}
        onCancel={() => setAsking(false)}
        onConfirm={() => {
          setAsking(false);
          void run(actions.stop);
        }}
      />
    </div>
  );
}

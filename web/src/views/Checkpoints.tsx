// The checkpoints on disk, the work that a kill could lose now, and a button that saves at once.

import type { NodeStatus } from "../api/status";
import { useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { CheckpointCard } from "../components/cards";
import { actionOf, Card, Section } from "../components/parts";
import { bytes, count, dateAndTime, duration, loss, shortTime } from "../format";

interface Props {
  status: NodeStatus;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
  onMessage: (text: string, failed: boolean) => void;
}

export function Checkpoints({ status, nodeNow, reachable, actions, onMessage }: Props) {
  const [busy, setBusy] = useState(false);
  const { checkpoints } = status;
  const save = async () => {
    setBusy(true);
    try {
      onMessage(await actions.saveCheckpoint(), false);
    } catch (error) {
      onMessage(error instanceof Error ? error.message : String(error), true);
    } finally {
      setBusy(false);
    }
  };
  return (
    <Section title="Checkpoints">
      <div class="grid grid-two">
        <CheckpointCard status={status} nodeNow={nodeNow} />
        <Card title="Save now" hint={`It saves by itself about every ${duration(checkpoints.interval_seconds)}.`}>
          <p>
            <button type="button" class="button button-primary" {...actionOf(busy || !reachable || !status.model, () => void save())}>
              Save a checkpoint now
            </button>
          </p>
          <p class="muted small">
            {checkpoints.last_stall_seconds > 0 && `The last one interrupted training for ${shortTime(checkpoints.last_stall_seconds)}. `}
            Writing happens in the background.
          </p>
        </Card>
      </div>
      <Card title="On disk" hint={checkpoints.folder} wide>
        {checkpoints.generations.length === 0 ? <p class="muted">No checkpoint yet.</p> : <Generations status={status} />}
      </Card>
    </Section>
  );
}

function Generations({ status }: { status: NodeStatus }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="List of checkpoints">
      <table>
        <thead>
          <tr>
            <th scope="col">Step</th>
            <th scope="col">Saved</th>
            <th scope="col">Loss</th>
            <th scope="col">Outer step</th>
            <th scope="col">Size</th>
          </tr>
        </thead>
        <tbody>
          {status.checkpoints.generations.map((item) => (
            <tr key={item.path}>
              <th scope="row">{count(item.step)}</th>
              <td>{dateAndTime(item.time)}</td>
              <td>{loss(item.loss)}</td>
              <td>{count(item.outer_step)}</td>
              <td>{bytes(item.bytes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

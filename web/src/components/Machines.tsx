// The machines of the owner's wallet: one row each, and buttons that pause and resume all of them or one.

import type { Machine, MachineList } from "../api/responses";
import { useState } from "preact/hooks";
import type { MachineStep, NodeActions } from "../api/actions";
import { Fault, useSending } from "../setup/fields";
import { useReading } from "../state/reading";
import { factsOf, MACHINES, nameOf, nextStep, placeOf, stateWords, toneOf } from "../words/machines";
import { actionOf, Card, Icon, Section } from "./parts";

const READ_MS = 4_000;

interface Props {
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
}

/** Nothing while this is the only machine of the wallet. */
export function Machines({ nodeNow, reachable, actions }: Props) {
  const [result, setResult] = useState<MachineList | null>(null); // of the last command
  const listed = useReading(actions.readMachines, reachable, result, READ_MS);
  const { busy, faults, send } = useSending();
  if (listed === null || listed.machines.length < 2) return null;
  const order = (step: MachineStep, nodeId?: string) =>
    send(async () => {
      setResult(null);
      setResult(await actions.orderMachines(step, nodeId));
    });
  const outcomes = new Map(result?.machines.map((one) => [one.node_id, one]));
  return (
    <Section title="Machines">
      <Card title={MACHINES.title} hint={MACHINES.about} wide>
        <div class="machine-buttons">
          <button type="button" class="button" {...actionOf(busy || !reachable, () => order("pause"))}>
            <Icon name="pause" />
            {MACHINES.pauseAll}
          </button>
          <button type="button" class="button" {...actionOf(busy || !reachable, () => order("resume"))}>
            <Icon name="play" />
            {MACHINES.resumeAll}
          </button>
        </div>
        <p class="small" role="status">
          {busy ? "Waiting for the answers…" : result?.message}
        </p>
        <Fault id="machines-fault" text={faults.other} />
        <ul class="members">
          {listed.machines.map((one) => (
            <Row key={one.node_id} machine={one} outcome={outcomes.get(one.node_id)} nodeNow={nodeNow} reachable={reachable} busy={busy} order={order} />
          ))}
        </ul>
        {listed.machines.some((one) => !one.is_reachable) && <p class="muted small">{MACHINES.away}</p>}
      </Card>
    </Section>
  );
}

interface RowProps {
  machine: Machine;
  outcome: Machine | undefined;
  nodeNow: number;
  reachable: boolean;
  busy: boolean;
  order: (step: MachineStep, nodeId?: string) => void;
}

function Row({ machine, outcome, nodeNow, reachable, busy, order }: RowProps) {
  const step = nextStep(machine);
  const words = step === "pause" ? "Pause" : "Resume";
  const failed = outcome?.has_obeyed === false ? outcome.message : "";
  return (
    <li>
      <div>
        <strong>{nameOf(machine)}</strong>{" "}
        <span class={`muted small ${machine.is_here ? "" : "mono"}`} title={machine.node_id}>
          {placeOf(machine)}
        </span>
        <div>
          <span class={`pill tone-${toneOf(machine)}`}>
            <i class="dot" aria-hidden="true" />
            {stateWords(machine)}
          </span>
        </div>
        <div class="muted small">{factsOf(machine, nodeNow)}</div>
        {failed && <div class="text-bad small">{failed}</div>}
      </div>
      <button
        type="button"
        class="button"
        aria-label={`${words}: ${nameOf(machine)}, ${placeOf(machine)}`}
        {...actionOf(busy || !reachable || !machine.is_reachable, () => order(step, machine.node_id))}
      >
        {words}
      </button>
    </li>
  );
}

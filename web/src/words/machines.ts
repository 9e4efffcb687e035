// The sentences about the machines of the owner's wallet. Pure.

import type { Machine } from "../api/responses";
import { ago, bigCount, count, shortId } from "../format";
import type { Tone } from "./verdict";
import { STATE_NAMES, stateTone } from "./verdict";

export const MACHINES = {
  title: "Your machines",
  about:
    "Nodes with your wallet. They can pause and resume each other, and nothing else. If one was stolen, type on another one: neuroshard wallet revoke, and the last digits here.",
  pauseAll: "Pause all",
  resumeAll: "Resume all",
  away: "A pause does not wait for a machine that cannot be reached. Repeat it when the machine is back.",
};

export function nameOf(machine: Machine): string {
  return machine.status?.name || shortId(machine.node_id);
}

/** Two machines may have the same name. */
export function placeOf(machine: Machine): string {
  return machine.is_here ? "this computer" : shortId(machine.node_id);
}

export function stateWords({ status, is_reachable: isReachable }: Machine): string {
  return status === null || !isReachable ? "Cannot be reached" : STATE_NAMES[status.state];
}

export function toneOf(machine: Machine): Tone {
  return machine.status === null || !machine.is_reachable ? "warn" : stateTone(machine.status.state);
}

/** Speed, work of a day, run, model and version; of a machine that is away its last state. */
export function factsOf({ status, is_reachable: isReachable, seen_at: seenAt }: Machine, nodeNow: number): string {
  if (status === null) return "It has never answered.";
  if (!isReachable) return `Last seen ${ago(seenAt, nodeNow)}: ${STATE_NAMES[status.state].toLowerCase()}`;
  const model = status.parameters > 0 ? `${bigCount(status.parameters)} parameters` : "";
  const run = status.run_id ? `run ${status.run_id.slice(0, 8)}` : "no run yet";
  const work = [`${count(status.tokens_per_second)} tokens/s`, `${bigCount(status.tokens_in_a_day)} tokens in 24 h`];
  return [...work, run, model, `version ${status.version}`].filter(Boolean).join(" · ");
}

/** Only a paused machine is resumed by its own button. */
export function nextStep(machine: Machine): "pause" | "resume" {
  return machine.status?.state === "paused" ? "resume" : "pause";
}

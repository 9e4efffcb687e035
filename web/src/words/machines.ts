// The sentences about the computers of the owner's wallet. Pure.

import type { Machine } from "../api/responses";
import { ago, bigCount, count, shortId } from "../format";
import type { Tone } from "./verdict";
import { STATE_NAMES, stateTone } from "./verdict";

export const MACHINES = {
  title: "Your computers",
  about: "Nodes with your wallet. They obey each other and nobody else, and only to pause and to resume.",
  pauseAll: "Pause all",
  resumeAll: "Resume all",
  away: "A computer that cannot be reached is not paused, and not paused later either.",
};

export function nameOf(machine: Machine): string {
  return machine.status?.name || shortId(machine.node_id);
}

/** "Training", or when it was heard of last and what it did then. */
export function stateWords(machine: Machine, nodeNow: number): string {
  if (machine.status === null) return "Cannot be reached";
  const state = STATE_NAMES[machine.status.state];
  return machine.is_reachable ? state : `Cannot be reached; ${ago(machine.seen_at, nodeNow)}: ${state.toLowerCase()}`;
}

export function toneOf(machine: Machine): Tone {
  return machine.status === null || !machine.is_reachable ? "warn" : stateTone(machine.status.state);
}

/** Speed, work of a day, run and version; of a computer that is away only the version and the run. */
export function factsOf({ status, is_reachable: isReachable }: Machine): string {
  if (status === null) return "";
  const model = status.parameters > 0 ? `${bigCount(status.parameters)} parameters` : "";
  const run = status.run_id ? `run ${status.run_id.slice(0, 8)}` : "no run yet";
  const work = isReachable ? [`${count(status.tokens_per_second)} tokens/s`, `${bigCount(status.tokens_in_a_day)} tokens in 24 h`] : [];
  return [...work, run, model, `version ${status.version}`].filter(Boolean).join(" · ");
}

/** Only a paused computer is resumed by its own button. */
export function nextStep(machine: Machine): "pause" | "resume" {
  return machine.status?.state === "paused" ? "resume" : "pause";
}

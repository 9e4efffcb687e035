// Rounds in plain sentences. Pure: values in, words out.

import type { PhaseSeconds, RoundContribution, RoundsSummary, RunRound } from "../api/responses";
import type { NodeStatus } from "../api/status";
import { count, listed, percent, plural, shortId, shortTime } from "../format";
import type { Tone } from "./verdict";

export const PHASES: Record<keyof PhaseSeconds, string> = {
  gather: "gathering",
  exchange: "exchanging",
  vote: "voting",
};

const NAMED = 3; // of those who sent nothing

const REFUSALS: Record<string, string> = {
  not_finite: "it held values that are not numbers",
  zero: "it was empty",
  norm: "it was far larger or smaller than the others'",
  direction: "it pulled against the majority",
};

const ABANDONED: Record<NonNullable<RunRound["abandoned_for"]>, string> = {
  no_answer: "Too few computers answered in time.",
  objection: "This computer found that the result makes the model worse, and voted against it.",
  contributions: "No contribution was accepted, or too few for the run's rule.",
  node: "This computer took no part",
};

/** The sentence above everything: whether this computer agrees with others. */
export function roundsSentence(answer: RoundsSummary, status: NodeStatus): string {
  const [newest] = answer.rounds;
  if (!newest) return status.peer_count === 0 ? "No round yet: this computer is alone." : "No round yet.";
  const tried = answer.completed + abandonedCount(answer);
  if (answer.completed === 0) return `None of ${plural(tried, "round")} has completed yet. Training continues meanwhile.`;
  if (hasDiffered(answer)) return "Computers with the same layers hold different weights after the same round.";
  if (newest.abandoned_for !== null) return "The last round came to nothing. The next one includes the work since then.";
  return `${count(answer.completed)} of ${plural(tried, "round")} completed: ${plural(taking(newest), "computer")} agree on the same weights, bit for bit.`;
}

export function roundsTone(answer: RoundsSummary): Tone {
  const [newest] = answer.rounds;
  if (!newest) return "busy";
  if (hasDiffered(answer)) return "bad";
  return newest.abandoned_for === null ? "good" : "warn";
}

/** The reason why a computer has no rounds yet. */
export function waitingSentence(status: NodeStatus): string {
  const left = Math.max(0, status.diloco.inner_steps_total - status.diloco.inner_step);
  if (status.peer_count === 0) {
    return "A round needs a second computer that holds the same layers. Until one joins, this computer trains alone.";
  }
  return `Computers with the same layers learn apart and then agree on one average. ${plural(left, "step")} of this computer are left until a round is due.`;
}

export function agreementWords(answer: RoundsSummary): string {
  if (answer.hash_agreement_rate === null) return "not known";
  return `${percent(answer.hash_agreement_rate)} of the computers that are as far hold the certified weights`;
}

export function abandonedCount(answer: RoundsSummary): number {
  return Object.values(answer.abandoned).reduce((sum, one) => sum + one, 0);
}

export function refusedCount(answer: RoundsSummary): number {
  return Object.values(answer.refused).reduce((sum, one) => sum + one, 0);
}

/** "2: it was empty; 1: it pulled against the majority" */
export function refusalsWords(answer: RoundsSummary): string {
  const counts = Object.entries(answer.refused).map(([refusal, times]) => `${count(times)}: ${REFUSALS[refusal] ?? "for another reason"}`);
  return counts.length > 0 ? counts.join("; ") : "every contribution passed the checks";
}

/** How many audits were skipped, and what an audit is. */
export function skippedWords(answer: RoundsSummary): string {
  return `${count(answer.skipped_audits)}. An audit compares random blocks of a result with those that the computers sent; it is skipped if one of them does not answer in 5 seconds.`;
}

export function resultWords(round: RunRound): readonly [string, Tone] {
  if (round.abandoned_for !== null) return ["abandoned", "warn"];
  return round.is_late ? ["completed late", "good"] : ["completed", "good"];
}

/** Why a round came to nothing; "" for one that completed in time. */
export function outcomeSentence(round: RunRound): string {
  if (round.abandoned_for === "node") return `${ABANDONED.node}: ${round.reason}.`;
  if (round.abandoned_for !== null) return ABANDONED[round.abandoned_for];
  return round.is_late ? "Training had continued; what was learned meanwhile was added to the result." : "";
}

/** "3 computers"; "1 of 3 computers" when others did not come; "3 computers were called" when nothing came of it. */
export function membersWords(round: RunRound): string {
  if (round.members.every((member) => member.part === "unjudged")) return `${plural(round.members.length, "computer")} ${round.members.length === 1 ? "was" : "were"} called`;
  const came = taking(round);
  return came === round.members.length ? plural(came, "computer") : `${count(came)} of ${plural(round.members.length, "computer")}`;
}

/** The contributions that are not in the result: a sentence for each contribution that was refused or too small, and one for all that did not come. */
export function troubleSentences(round: RunRound, own: string | null): string[] {
  const refused = round.members.filter((member) => member.part === "refused");
  const absent = round.members.filter((member) => member.part === "absent").map((member) => who(member.node_id, own));
  const sentences = refused.map((member) => `${whose(member, own)} was refused: ${REFUSALS[member.refusal] ?? member.reason}.`);
  for (const member of round.members.filter((one) => one.part === "abstained")) {
    sentences.push(`${who(member.node_id, own)} had learned too little to count; it goes into the next round.`);
  }
  const named = absent.length <= NAMED ? absent : [...absent.slice(0, NAMED), `${count(absent.length - NAMED)} more`];
  return absent.length > 0 ? [...sentences, `${listed(named)} ${absent.length === 1 ? "was" : "were"} called and sent nothing.`] : sentences;
}

/** "12 ms gathering, 340 ms exchanging, 55 ms voting"; what took no time is left out. */
export function phaseWords(phases: PhaseSeconds): string {
  const names = Object.keys(PHASES) as (keyof PhaseSeconds)[];
  const shown = names.filter((name) => (phases[name] ?? 0) >= 0.0005).map((name) => `${shortTime(phases[name])} ${PHASES[name]}`);
  return shown.length > 0 ? shown.join(", ") : "no time";
}

/** "quarter 2 of 4 (streaming)": what a round is about. */
export function partWords(round: { part: string; strategy: string }): string {
  return `${round.part} (${round.strategy})`;
}

export function certificateWords(round: RunRound): string {
  return round.certificate === null ? "" : `${count(round.certificate.votes)} of ${plural(round.certificate.voters, "vote")}`;
}

export function who(id: string, own: string | null): string {
  return id === own ? "This computer" : shortId(id);
}

function whose(member: RoundContribution, own: string | null): string {
  return member.node_id === own ? "What this computer learned" : `What ${shortId(member.node_id)} sent`;
}

function taking(round: RunRound): number {
  return round.members.filter((member) => member.part !== "absent").length;
}

function hasDiffered(answer: RoundsSummary): boolean {
  return answer.hash_agreement_rate !== null && answer.hash_agreement_rate < 1;
}

// The one-glance answers, in plain sentences. Pure: status in, words out.

import type { NodeStatus } from "../api/status";
import { choices, count, duration, nounOf } from "../format";
import type { Said } from "./figures";
import { figure, say } from "./figures";
import { layerWords, missingSentence } from "./pipeline";

export type Tone = "good" | "busy" | "warn" | "bad";

export interface Answer {
  question: string;
  tone: Tone;
  short: string;
  sentence: Said;
}

export interface VerdictWords {
  headline: string;
  tone: Tone;
  answers: Answer[];
}

/** `gone`: the node does not answer and the status is what it said last. */
export function verdictWords(status: NodeStatus, now: number, gone: boolean): VerdictWords {
  if (gone) return lastWords(status);
  const working = isItWorking(status, now);
  const helped = didItHelp(status);
  const better = isItBetter(status);
  return { headline: headline(status), tone: worst([working.tone, better.tone]), answers: [working, helped, better] };
}

function lastWords(status: NodeStatus): VerdictWords {
  const sentence = ["Everything below is what it said last."];
  const working: Answer = { question: "Is it working?", tone: "bad", short: "No answer", sentence };
  return { headline: "The node does not answer.", tone: "bad", answers: [working, didItHelp(status), isItBetter(status)] };
}

function headline(status: NodeStatus): string {
  switch (status.state) {
    case "starting":
      return "Your computer is getting ready to train.";
    case "waiting_for_data":
      return "Your computer is ready, but the training text has not arrived yet.";
    case "waiting_for_stages":
      return waitingHeadline(status);
    case "paused":
      return "Training is paused. Finished steps are kept.";
    case "not_training":
      return "The node runs, but it does not train.";
    case "failed":
      return "Training stopped because of a problem.";
    case "stopping":
      return "The node is saving its work and stopping.";
    case "training":
      if (status.is_standing_by) return "Your computer is ready, and there is nothing for it to do at present.";
      return trainingHeadline(status);
  }
}

function waitingHeadline(status: NodeStatus): string {
  const missing = status.pipeline?.missing_layers ?? [];
  if (missing.length === 0) return "Your computer is ready, but it waits for others that hold the rest of the model.";
  return `Your computer is ready, but nobody holds ${layerWords(missing)} yet.`;
}

/** Why nothing is trained, and that nothing has to be done about it. */
export function waitingSentence(status: NodeStatus): string {
  const missing = status.pipeline?.missing_layers ?? [];
  if (missing.length === 0) return status.state_reason;
  return `${missingSentence(missing)} Training resumes by itself as soon as another computer takes them.`;
}

function trainingHeadline(status: NodeStatus): string {
  switch (status.verification.status) {
    case "verified":
      return "Your computer is teaching a language model, and the model is really learning.";
    case "improving":
      return "Your computer is teaching a language model, and it is getting better.";
    case "stalled":
      return "Your computer is training, but the model has stopped getting better.";
    case "diverged":
      return "Your computer is training, but the model is getting worse.";
    default:
      return "Your computer is training. It is too early to tell how well.";
  }
}

function isItWorking(status: NodeStatus, now: number): Answer {
  const question = "Is it working?";
  switch (status.state) {
    case "training": {
      const speed = status.training.tokens_per_second ?? 0;
      if (status.is_standing_by) {
        return { question, tone: "busy", short: "Ready", sentence: [status.state_reason] };
      }
      const sentence =
        speed > 0
          ? say`It reads ${figure("training.tokens_per_second", speed, count)} tokens (word pieces) per second.${slowedWords(status)}`
          : ["The first steps are being measured."];
      return { question, tone: "good", short: "Yes", sentence };
    }
    case "starting": {
      const stage = status.startup.find((item) => item.state === "running");
      const sentence = stage ? `${stage.name}${stage.detail ? `: ${stage.detail}` : ""}.` : status.state_reason;
      return { question, tone: "busy", short: "Starting", sentence: [sentence] };
    }
    case "paused": {
      const left = status.paused_until == null ? "" : ` It resumes by itself in ${duration(status.paused_until - now)}.`;
      return { question, tone: "warn", short: "Paused", sentence: [`${status.state_reason}${left}`] };
    }
    case "waiting_for_data":
      return { question, tone: "warn", short: "Waiting", sentence: [status.state_reason] };
    case "waiting_for_stages":
      return { question, tone: "warn", short: "Waiting", sentence: [waitingSentence(status)] };
    case "stopping":
      return { question, tone: "busy", short: "Stopping", sentence: [status.state_reason] };
    case "not_training":
      return { question, tone: "warn", short: "Not training", sentence: [status.state_reason] };
    case "failed":
      return { question, tone: "bad", short: "No", sentence: [status.state_reason] };
  }
}

function slowedWords({ owner_policy }: NodeStatus): string {
  return owner_policy.decision.action === "throttle" ? ` ${owner_policy.decision.reason}` : "";
}

function didItHelp(status: NodeStatus): Answer {
  const question = "Did my computer help?";
  const { accepted, contribution, training } = status;
  const [steps, at] = contribution ? [contribution.steps, "contribution.steps"] : [training.steps, "training.steps"];
  if (steps === 0) {
    return { question, tone: "busy", short: "Not yet", sentence: ["It has not finished its first learning step yet."] };
  }
  const made = say`It made ${figure(at, steps, count)} learning ${nounOf(steps, "step")}.`;
  const worth =
    accepted.rounds > 0
      ? say` The others accepted its work in ${figure("accepted.rounds", accepted.rounds, count)} ${nounOf(accepted.rounds, "round")}.`
      : status.peer_count === 0
        ? [" It trains on its own."]
        : [];
  return { question, tone: "good", short: "Yes", sentence: [...made, ...worth] };
}

function isItBetter(status: NodeStatus): Answer {
  const question = "Is the model getting better?";
  const { status: verdict, reason } = status.verification;
  const measured = improvementSentence(status);
  switch (verdict) {
    case "verified":
      return { question, tone: "good", short: "Yes, verified", sentence: measured ?? [reason] };
    case "improving":
      return { question, tone: "good", short: "It looks like it", sentence: measured ?? [reason] };
    case "insufficient_data":
      return { question, tone: "busy", short: "Too early to tell", sentence: [reason] };
    case "stalled":
      return { question, tone: "warn", short: "Not at the moment", sentence: [reason] };
    case "diverged":
      return { question, tone: "bad", short: "No", sentence: [reason] };
    case "not_training":
      return { question, tone: "warn", short: "It is not training", sentence: measured ?? [reason] };
  }
}

/** Loss falls from a to b: exp(loss) is the number of equally likely choices that would be as hard to guess. */
function improvementSentence(status: NodeStatus): Said | null {
  const held = status.training.held_out;
  const first = held[0]?.loss ?? null;
  const last = held[held.length - 1]?.loss ?? null;
  if (first === null || last === null || last >= first) return null;
  const [before, now] = [figure("training.held_out.0.loss", first, asChoices), figure("training.held_out_loss", last, asChoices)];
  return say`On text it never trained on, it first guessed the next token among ${before} likely ones, now among ${now}.`;
}

function asChoices(loss: number | null | undefined): string {
  return loss == null ? "–" : choices(loss);
}

const ORDER: Tone[] = ["good", "busy", "warn", "bad"];

function worst(tones: Tone[]): Tone {
  return tones.reduce((a, b) => (ORDER.indexOf(b) > ORDER.indexOf(a) ? b : a), "good" as Tone);
}

export const STATE_NAMES: Record<NodeStatus["state"], string> = {
  starting: "Starting",
  waiting_for_data: "Waiting for data",
  waiting_for_stages: "Waiting for layers",
  training: "Training",
  paused: "Paused",
  not_training: "Not training",
  failed: "Stopped by a problem",
  stopping: "Stopping",
};

export function stateTone(state: NodeStatus["state"]): Tone {
  if (state === "training") return "good";
  if (state === "failed") return "bad";
  return state === "starting" || state === "stopping" ? "busy" : "warn";
}

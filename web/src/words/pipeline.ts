// The pipeline in plain sentences. Pure: values in, words out. Stages and layers are counted from 1 for people.

import type { Bottleneck, HopTimes, MicrobatchTrace, PipelineSummary, RunStage, StageLoad, Takeover } from "../api/responses";
import type { LayerRange } from "../api/status";
import { count, duration, layerRange, listed, percent, plural, shortId, shortTime } from "../format";
import type { Tone } from "./verdict";

/** Where time goes at one stage. */
export type StageTime = Omit<StageLoad, "nodes">;

export function stageName(stage: number): string {
  return `Stage ${count(stage + 1)}`;
}

/** "layers 1–4 and 9–12"; one layer is "layer 3". */
export function layerWords(ranges: readonly LayerRange[]): string {
  const [only] = ranges;
  if (only && ranges.length === 1) return layerRange(only);
  return `layers ${listed(ranges.map((layers) => layerRange(layers).replace(/^layers? /, "")))}`;
}

/** "Nobody holds layers 9–12 yet." */
export function missingSentence(ranges: readonly LayerRange[]): string {
  return `Nobody holds ${layerWords(ranges)} yet.`;
}

/** Whether those that have a stage do not do it, though they should. */
export function isUnanswered(stage: RunStage, pipeline: PipelineSummary): boolean {
  return !stage.is_missing && !stage.is_resting && (pipeline.flow?.unanswered.includes(stage.stage) ?? false);
}

export function pipelineTone(pipeline: PipelineSummary): Tone {
  if (pipeline.stages.length === 0) return "busy";
  if (pipeline.stages.some((stage) => stage.is_missing || isUnanswered(stage, pipeline))) return "bad";
  return pipeline.stages.some((stage) => stage.is_resting) ? "warn" : "good";
}

/** One sentence on whether the stages are all there. */
export function pipelineSentence(pipeline: PipelineSummary): string {
  const { stages } = pipeline;
  if (stages.length === 0) return "The stages of the model are not known yet.";
  if (pipeline.missing_layers.length > 0) return `${missingSentence(pipeline.missing_layers)} Training waits for a computer that takes them.`;
  const resting = stages.filter((stage) => stage.is_resting);
  if (resting.length > 0) {
    const names = listed(resting.map((stage) => count(stage.stage + 1)));
    return `Every computer that holds stage ${names} is paused. Training waits until one resumes.`;
  }
  const silent = stages.filter((stage) => isUnanswered(stage, pipeline));
  if (silent.length > 0) {
    return `Nobody who holds stage ${listed(silent.map((stage) => count(stage.stage + 1)))} answers. Training waits while they are asked again.`;
  }
  if (stages.length === 1) return "The model is in one piece: a computer that trains holds all of it.";
  return `The model is cut into ${count(stages.length)} stages, and every one of them is held.`;
}

/** The stages that would be lost with one computer; null when every stage has a second holder. */
export function singleSentence(stages: readonly RunStage[]): string | null {
  const alone = stages.filter((stage) => stage.has_single_holder);
  const single = alone.length;
  if (single === 0 || stages.length < 2) return null;
  const which = single === stages.length ? "Every stage is" : `${count(single)} of ${count(stages.length)} stages ${single === 1 ? "is" : "are"}`;
  return `${which} on one computer only. When one leaves, training stops until another takes its place. ${copiesSentence(alone)}`.trim();
}

function copiesSentence(alone: readonly RunStage[]): string {
  const without = alone.filter((stage) => stage.has_copy === false);
  if (without.length > 0) return `No second copy yet of stage ${listed(without.map((stage) => count(stage.stage + 1)))}.`;
  const ages = alone.flatMap((stage) => (stage.copy_age_seconds === null ? [] : [stage.copy_age_seconds]));
  if (ages.length < alone.length) return "";
  return `${ages.length === 1 ? "Its second copy is" : "The oldest of their second copies is"} ${duration(Math.max(...ages))} old.`;
}

/** The loss if the only computer that trains a stage ended; "" when there are several. */
export function copySentence(stage: RunStage): string {
  if (!stage.has_single_holder) return "";
  const risk = "One computer trains it: when that leaves, training stops until another one takes its place.";
  if (stage.has_copy === null) return risk;
  if (!stage.has_copy || stage.copy_age_seconds === null) return `${risk} No second copy yet.`;
  return `${risk} Second copy ${duration(stage.copy_age_seconds)} old: no more than that is lost.`;
}

/** This node's part in the pipeline. */
export function ownPartSentence(pipeline: PipelineSummary, id: string | null): string {
  const here = pipeline.stages.filter((stage) => stage.is_here);
  const first = here[0];
  const last = here[here.length - 1];
  if (!first || !last) return pipeline.flow ? "It holds no layers: it drives microbatches through those of others." : "It holds no layers.";
  const layers = layerRange({ start: first.layers.start, stop: last.layers.stop });
  const ready = here.every((stage) => id === null || !stage.joining.includes(id));
  if (here.length === pipeline.stages.length) return ready ? "It holds the whole model." : "It gets ready to hold the whole model.";
  const which = first === last ? stageName(first.stage).toLowerCase() : `stages ${count(first.stage + 1)} to ${count(last.stage + 1)}`;
  return `It ${ready ? "holds" : "gets ready for"} ${which}, ${layers} of ${count(pipeline.layer_count)}.`;
}

/** How many computers have a stage, and whether that is trouble. */
export function coverageWords(stage: RunStage, pipeline: PipelineSummary): readonly [string, Tone | null] {
  const have = stage.holders.length - stage.joining.length;
  if (stage.is_missing) return stage.joining.length > 0 ? ["getting ready", "bad"] : ["nobody", "bad"];
  if (stage.is_resting) return ["all paused", "warn"];
  if (isUnanswered(stage, pipeline)) return ["no answer", "bad"];
  return stage.has_single_holder ? ["1 computer", null] : [plural(have, "computer"), "good"];
}

/** All about a stage's holders. */
export function holdersSentence(stage: RunStage, pipeline: PipelineSummary): string {
  const working = stage.holders.length - stage.joining.length - stage.paused.length;
  const doing = isUnanswered(stage, pipeline) ? `${working === 1 ? "does" : "do"} not answer` : "can work on it";
  const parts = [
    working > 0 ? `${plural(working, "computer")} ${doing}` : "nobody can work on it now",
    stage.paused.length > 0 ? `${plural(stage.paused.length, "computer")} ${stage.paused.length === 1 ? "is" : "are"} paused` : "",
    stage.joining.length > 0 ? `${plural(stage.joining.length, "computer")} ${stage.joining.length === 1 ? "gets" : "get"} ready for it` : "",
  ].filter(Boolean);
  const text = listed(parts);
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

export function holderState(stage: RunStage, pipeline: PipelineSummary, id: string): string {
  if (stage.joining.includes(id)) return "gets ready";
  if (stage.paused.includes(id)) return "paused";
  return isUnanswered(stage, pipeline) ? "does not answer" : "can work";
}

export function bottleneckSentence(bottleneck: Bottleneck, own: string | null): string {
  const where = bottleneck.node_id === own ? "on this computer" : `slowest on ${shortId(bottleneck.node_id)}`;
  const share = bottleneck.share === null ? "" : `, ${percent(bottleneck.share)} of its time at all stages`;
  return `${stageName(bottleneck.stage)} is the bottleneck, ${where}: a microbatch spends ${shortTime(bottleneck.seconds)} there, at work or waiting${share}.`;
}

/** The text next to a bar, which a screen reader reads too. */
export function timeWords(time: StageTime): string {
  const parts: [number | null, string][] = [
    [time.compute_seconds, "at work"],
    [time.wait_seconds, "waiting"],
    [time.wire_seconds, "on the way"],
  ];
  const shown = parts.filter(([seconds]) => (seconds ?? 0) >= 0.0005).map(([seconds, words]) => `${shortTime(seconds)} ${words}`);
  return shown.length > 0 ? shown.join(", ") : "no time";
}

export function takeoverSentence(takeover: Takeover): string {
  const kind = takeover.is_exact ? "exact: both had the same weights" : "approximate: their weights may differ";
  return `${stageName(takeover.stage)} went from ${shortId(takeover.before)} to ${shortId(takeover.after)} (${kind}).`;
}

/** Seconds of a microbatch by what they were spent on. */
export function partsOf(trace: MicrobatchTrace): Record<"compute" | "wait" | "wire" | "other", number> {
  const sum = (pick: (hop: HopTimes) => number | null) => trace.hops.reduce((total, hop) => total + (pick(hop) ?? 0), 0);
  return {
    compute: sum((hop) => hop.compute_seconds),
    wait: sum((hop) => hop.wait_seconds),
    wire: sum((hop) => hop.wire_seconds),
    other: trace.other_seconds ?? 0,
  };
}

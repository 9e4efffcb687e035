// The loss curve as data: at most 1,000 points, as the node sends them. Pure.

import type { LossPoint } from "../api/responses";
import type { HeldOutPoint } from "../api/status";

export interface Curve {
  train: (LossPoint & { loss: number })[];
  heldOut: HeldOutPoint[];
}

/** Columns for the plot, one x axis: steps, raw loss, smoothed loss, held-out loss. */
export type Columns = [number[], (number | null)[], (number | null)[], (number | null)[]];

export function emptyCurve(): Curve {
  return { train: [], heldOut: [] };
}

/** Mean over about 2 % of the points around each one: no lag, unlike an exponential mean. It starts at the first value. */
export function smoothed(values: readonly number[]): number[] {
  const reach = reachOf(values.length);
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1]! + value);
  return values.map((_, index) => {
    const from = Math.max(0, index - reach);
    const to = Math.min(values.length, index + Math.min(reach, index) + 1);
    return (sums[to]! - sums[from]!) / (to - from);
  });
}

/** The smoothed training loss at the newest point: the mean of the last ones, as in `smoothed`. */
export function smoothedEnd(curve: Curve): number | null {
  const last = curve.train.slice(-reachOf(curve.train.length) - 1);
  return last.length === 0 ? null : last.reduce((sum, point) => sum + point.loss, 0) / last.length;
}

function reachOf(count: number): number {
  return Math.max(4, Math.round(count * 0.01));
}

export function columns(curve: Curve): Columns {
  const smooth = smoothed(curve.train.map((point) => point.loss));
  const steps: number[] = [];
  const raw: (number | null)[] = [];
  const mean: (number | null)[] = [];
  const held: (number | null)[] = [];
  let h = 0;
  const pushHeldOutBelow = (limit: number) => {
    for (; h < curve.heldOut.length && curve.heldOut[h]!.step < limit; h++) {
      steps.push(curve.heldOut[h]!.step);
      raw.push(null);
      mean.push(null);
      held.push(curve.heldOut[h]!.loss);
    }
  };
  curve.train.forEach((point, index) => {
    pushHeldOutBelow(point.step);
    const meets = curve.heldOut[h]?.step === point.step;
    steps.push(point.step);
    raw.push(point.loss);
    mean.push(smooth[index] ?? null);
    held.push(meets ? curve.heldOut[h++]!.loss : null);
  });
  pushHeldOutBelow(Infinity);
  return [steps, raw, mean, held];
}

/** At most `rows` rows spread over the curve, for the table that replaces the picture. */
export function tableRows(curve: Curve, rows = 10): { step: number; train: number | null; heldOut: number | null }[] {
  const [steps, , mean, held] = columns(curve);
  const wanted = new Set<number>();
  for (let i = 0; i < rows && steps.length > 0; i++) wanted.add(Math.round((i / (rows - 1)) * (steps.length - 1)));
  let lastMean: number | null = null;
  let lastHeld: number | null = null;
  const result: { step: number; train: number | null; heldOut: number | null }[] = [];
  steps.forEach((step, index) => {
    lastMean = mean[index] ?? lastMean;
    lastHeld = held[index] ?? lastHeld;
    if (wanted.has(index)) result.push({ step, train: lastMean, heldOut: lastHeld });
  });
  return result;
}

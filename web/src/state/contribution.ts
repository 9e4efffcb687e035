// The work of this computer over time, in periods. Pure.

import type { WorkDone } from "../api/status";

export const SPANS = ["day", "week", "all"] as const;
export type Span = (typeof SPANS)[number];

/** The work of several stretches together; its loss is the mean over the tokens. */
export function together(points: readonly WorkDone[]): WorkDone {
  const sum = (of: (work: WorkDone) => number) => points.reduce((total, point) => total + of(point), 0);
  const measured = points.filter((point) => point.loss !== null && point.tokens > 0);
  const tokens = measured.reduce((total, point) => total + point.tokens, 0);
  return {
    start: points[0]?.start ?? 0,
    tokens: sum((work) => work.tokens),
    steps: sum((work) => work.steps),
    bytes_sent: sum((work) => work.bytes_sent),
    bytes_received: sum((work) => work.bytes_received),
    training_seconds: sum((work) => work.training_seconds),
    loss: tokens > 0 ? measured.reduce((total, point) => total + (point.loss ?? 0) * point.tokens, 0) / tokens : null,
  };
}

/** Tokens per second while it trained. */
export function speed(work: WorkDone): number | null {
  return work.training_seconds >= 1 ? work.tokens / work.training_seconds : null;
}

/** At most `most` rows; neighbours are put together. */
export function rows(points: readonly WorkDone[], most = 24): WorkDone[] {
  const size = Math.max(1, Math.ceil(points.length / most));
  const found: WorkDone[] = [];
  for (let at = 0; at < points.length; at += size) found.push(together(points.slice(at, at + size)));
  return found;
}

/** Columns for a plot: the middle of each stretch and its value; nothing is drawn across stretches without any. */
export function columns(points: readonly WorkDone[], width: number, value: (work: WorkDone) => number | null): [number[], (number | null)[]] {
  const times: number[] = [];
  const values: (number | null)[] = [];
  points.forEach((point, at) => {
    const before = points[at - 1];
    if (before && point.start - before.start > 1.5 * width) {
      times.push(before.start + 1.5 * width);
      values.push(null);
    }
    times.push(point.start + width / 2);
    values.push(value(point));
  });
  return [times, values];
}

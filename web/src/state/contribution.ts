// What this computer gave over time, and what the model wrote meanwhile; mirrors neuroshard/api/bodies/contribution.py.

export const SPANS = ["day", "week", "all"] as const;
export type Span = (typeof SPANS)[number];

export interface Work {
  start: number;
  tokens: number;
  steps: number;
  bytes_sent: number;
  bytes_received: number;
  training_seconds: number;
  loss: number | null;
}

export interface Contribution {
  span: Span;
  width_seconds: number;
  points: Work[]; // oldest first; stretches without anything are left out
  total: Work | null; // since the beginning
}

export interface Sample {
  step: number;
  last_step: number;
  time: number;
  seconds: number;
  texts: string[]; // one for each prompt
}

export interface Samples {
  prompts: string[];
  samples: Sample[];
  next_step: number | null;
  explanation: string; // why none are written
}

/** The work of several stretches together; its loss is the mean over the tokens. */
export function together(points: readonly Work[]): Work {
  const sum = (of: (work: Work) => number) => points.reduce((total, point) => total + of(point), 0);
  const told = points.filter((point) => point.loss !== null && point.tokens > 0);
  const tokens = told.reduce((total, point) => total + point.tokens, 0);
  return {
    start: points[0]?.start ?? 0,
    tokens: sum((work) => work.tokens),
    steps: sum((work) => work.steps),
    bytes_sent: sum((work) => work.bytes_sent),
    bytes_received: sum((work) => work.bytes_received),
    training_seconds: sum((work) => work.training_seconds),
    loss: tokens > 0 ? told.reduce((total, point) => total + (point.loss ?? 0) * point.tokens, 0) / tokens : null,
  };
}

/** Tokens a second while it trained. */
export function speed(work: Work): number | null {
  return work.training_seconds >= 1 ? work.tokens / work.training_seconds : null;
}

/** At most `most` rows; neighbours are put together. */
export function rows(points: readonly Work[], most = 24): Work[] {
  const size = Math.max(1, Math.ceil(points.length / most));
  const found: Work[] = [];
  for (let at = 0; at < points.length; at += size) found.push(together(points.slice(at, at + size)));
  return found;
}

/** Columns for a plot: the middle of each stretch and its value; nothing is drawn across stretches without any. */
export function columns(points: readonly Work[], width: number, value: (work: Work) => number | null): [number[], (number | null)[]] {
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

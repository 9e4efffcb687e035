// Ticks of an axis. Pure.

/** Steps between the ticks of an axis of whole numbers: it never shows 0 1 1 2 2. */
export const WHOLE_STEPS = [1, 2, 5].flatMap((first) => Array.from({ length: 12 }, (_, power) => first * 10 ** power)).sort((a, b) => a - b);

/** Labels of ticks; where the usual words would show two of them alike, with all their digits. */
export function tickLabels(ticks: readonly number[], words: (tick: number) => string): string[] {
  const labels = ticks.map(words);
  return new Set(labels).size === labels.length ? labels : ticks.map((tick) => String(Number(tick.toPrecision(6))));
}

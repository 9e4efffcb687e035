// One quantity over a span of time: bars for amounts, a line for a value.

import type { WorkSummary } from "../api/responses";
import type { WorkDone } from "../api/status";
import { useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import type { Span } from "../state/contribution";
import { columns } from "../state/contribution";
import { colourReader, usePlot } from "./plot";
import { tickLabels, WHOLE_STEPS } from "./ticks";

interface Props {
  contribution: WorkSummary;
  now: number;
  kind: "bars" | "line";
  value: (work: WorkDone) => number | null;
  shown: (value: number) => string;
  words: string; // the picture in words
}

const SPAN_SECONDS: Record<Span, number> = { day: 86_400, week: 7 * 86_400, all: 3_600 };
const LONG_SECONDS = 3 * 86_400;

export function SpanChart({ contribution, now, kind, value, shown, words }: Props) {
  const frame = useRef<HTMLDivElement>(null);
  const latest = useRef({ contribution, now });
  latest.current = { contribution, now };
  const data = useMemo(() => columns(contribution.points, contribution.width_seconds, value), [contribution, value]);
  const isEmpty = !data[1].some((one) => one !== null);
  const range = () => spanRange(latest.current.contribution, latest.current.now);
  usePlot(frame, (element) => options(element, kind, range, shown), data, isEmpty, contribution.span);
  return (
    <div class="curve">
      <div class="curve-frame curve-frame-small" ref={frame} role="img" aria-label={isEmpty ? "Nothing to draw yet." : words}>
        {isEmpty && <p class="curve-empty muted">Nothing in this time yet.</p>}
      </div>
    </div>
  );
}

/** Day and week end now; all of time begins with the record and is an hour at least. */
function spanRange({ span, points, width_seconds: width }: WorkSummary, now: number): uPlot.Range.MinMax {
  if (span !== "all") return [now - SPAN_SECONDS[span], now];
  const first = points[0]?.start ?? now;
  const last = (points.at(-1)?.start ?? now) + width;
  return [Math.min(first, last - SPAN_SECONDS.all), last];
}

function options(
  frame: HTMLElement,
  kind: Props["kind"],
  range: () => uPlot.Range.MinMax,
  shown: (value: number) => string,
): uPlot.Options {
  const colour = colourReader(frame);
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { font, stroke: () => colour("--text-muted"), grid: { stroke: () => colour("--curve-grid"), width: 1 }, ticks: { show: false } };
  return {
    width: frame.clientWidth,
    height: frame.clientHeight,
    legend: { show: false },
    cursor: { show: false },
    padding: [10, 10, 0, 0],
    scales: { x: { time: true, range }, y: { range: (_, low, high) => valueRange(kind, low, high) } },
    axes: [
      { ...axis, size: 30, space: 70, values: (plot, ticks) => ticks.map((tick) => timeWords(tick, (plot.scales["x"]?.max ?? 0) - (plot.scales["x"]?.min ?? 0))) },
      { ...axis, size: 62, ...(kind === "bars" ? { incrs: WHOLE_STEPS } : {}), values: (_, ticks) => tickLabels(ticks, shown) },
    ],
    series: [
      {},
      kind === "bars"
        ? { stroke: () => colour("--curve-train"), fill: () => colour("--curve-train"), width: 0, points: { show: false }, ...bars() }
        : { stroke: () => colour("--curve-train"), width: 2, points: { show: true, size: 4, fill: () => colour("--curve-train") } },
    ],
  };
}

function bars(): Pick<uPlot.Series, "paths"> {
  const make = uPlot.paths.bars;
  return make ? { paths: make({ size: [0.9, 40, 2] }) } : {};
}

function valueRange(kind: Props["kind"], low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [0, 1];
  if (kind === "bars") return [0, high > 0 ? high * 1.08 : 1];
  const margin = Math.max((high - low) * 0.1, high * 0.05, 0.05);
  return [Math.max(0, low - margin), high + margin];
}

function timeWords(time: number, span: number): string {
  const date = new Date(time * 1000);
  if (span < LONG_SECONDS) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  return date.toLocaleDateString([], span < 15 * 86_400 ? { weekday: "short", day: "numeric" } : { month: "short", day: "numeric" });
}

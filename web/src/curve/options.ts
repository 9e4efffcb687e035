// How uPlot draws the loss curve; colours come from CSS so that dark and light follow the page.

import type uPlot from "uplot";
import { count, loss } from "../format";
import { colourReader } from "./plot";
import { tickLabels, WHOLE_STEPS } from "./ticks";

export function plotOptions(frame: HTMLElement, onReading: (text: string | null) => void): uPlot.Options {
  const colour = colourReader(frame);
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = (label: string, size: number): uPlot.Axis => ({
    label,
    labelFont: font,
    labelSize: 20,
    size,
    font,
    stroke: () => colour("--text-muted"),
    grid: { stroke: () => colour("--curve-grid"), width: 1 },
    ticks: { show: false },
  });
  return {
    width: frame.clientWidth,
    height: frame.clientHeight,
    legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: true, y: false }, y: false },
    scales: { x: { time: false, range: stepRange }, y: { range: lossRange } },
    axes: [
      { ...axis("Learning steps", 34), incrs: WHOLE_STEPS, values: (_, ticks) => tickLabels(ticks, count) },
      { ...axis("Loss (nats per token)", 44), values: (_, ticks) => tickLabels(ticks, (tick) => String(Number(tick.toPrecision(6)))) },
    ],
    series: [
      {},
      { label: "Training loss", stroke: () => colour("--curve-train-raw"), width: 1, points: { show: false }, spanGaps: true },
      { label: "Smoothed", stroke: () => colour("--curve-train"), width: 2, points: { show: false }, spanGaps: true },
      {
        label: "Held-out loss",
        stroke: () => colour("--curve-held-out"),
        width: 2,
        spanGaps: true,
        points: { show: true, size: 6, fill: () => colour("--curve-held-out") },
      },
      { label: "Frequencies only", stroke: () => colour("--curve-reference"), width: 1, dash: [5, 5], points: { show: false } },
    ],
    hooks: { setCursor: [(plot) => onReading(reading(plot))] },
  };
}

/** One step wide at least: a single point would make uPlot invent decades of empty axis. */
function stepRange(_: uPlot, low: number, high: number): uPlot.Range.MinMax {
  return high - low < 1 ? [Math.max(0, low - 1), low + 10] : [low, high];
}

function lossRange(_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [0, 10];
  const margin = Math.max((high - low) * 0.06, 0.05);
  return [Math.max(0, low - margin), high + margin];
}

function reading(plot: uPlot): string | null {
  const index = plot.cursor.idx;
  if (index == null) return null;
  const step = plot.data[0][index];
  const parts = [`Step ${count(step)}`];
  const training = plot.data[1]?.[index];
  const held = plot.data[3]?.[index];
  if (training != null) parts.push(`training loss ${loss(training)}`);
  if (held != null) parts.push(`held-out loss ${loss(held)}`);
  return parts.join(" · ");
}

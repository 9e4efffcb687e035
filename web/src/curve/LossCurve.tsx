// The loss curve: training loss raw and smoothed, held-out loss, and the loss of merely knowing word frequencies.

import { useMemo, useRef, useState } from "preact/hooks";
import type uPlot from "uplot";
import { count, loss } from "../format";
import { noCurveWords } from "../words/part";
import { plotOptions } from "./options";
import { usePlot } from "./plot";
import type { Curve } from "./series";
import { columns, smoothedEnd, tableRows } from "./series";

interface Props {
  curve: Curve;
  unigramEntropy: number | null;
  roles: readonly string[];
  isBrief?: boolean; // without the words around it
}

export function LossCurve({ curve, unigramEntropy, roles, isBrief = false }: Props) {
  const frame = useRef<HTMLDivElement>(null);
  const reading = useRef<HTMLParagraphElement>(null);
  const data = useMemo(() => withReference(columns(curve), unigramEntropy), [curve, unigramEntropy]);
  const words = useMemo(() => curveInWords(curve), [curve]);
  const isEmpty = data[0].length === 0;
  const resting = isBrief ? "Lower is better." : "Lower is better. Drag to zoom in, double-click to see everything again.";

  usePlot(frame, (element) => plotOptions(element, (text) => setReading(reading.current, text ?? resting)), data, isEmpty);

  return (
    <figure class="curve">
      <Legend hasHeldOut={curve.heldOut.length > 0} hasReference={unigramEntropy !== null && !isBrief} />
      <div class={`curve-frame curve-frame-${isBrief ? "normal" : "tall"}`} ref={frame} role="img" aria-label={words}>
        {isEmpty && <p class="curve-empty muted">{noCurveWords(roles)}</p>}
      </div>
      <p class="curve-reading small muted" ref={reading} aria-hidden="true">
        {isEmpty ? "" : resting}
      </p>
      {!isEmpty && !isBrief && <CurveTable curve={curve} />}
    </figure>
  );
}

function setReading(element: HTMLElement | null, text: string): void {
  if (element) element.textContent = text;
}

function withReference(data: ReturnType<typeof columns>, unigramEntropy: number | null): uPlot.AlignedData {
  return [...data, data[0].map(() => unigramEntropy)] as uPlot.AlignedData;
}

function Legend({ hasHeldOut, hasReference }: { hasHeldOut: boolean; hasReference: boolean }) {
  return (
    <ul class="legend small">
      <li>
        <i class="key key-train" aria-hidden="true" /> Training loss (line: smoothed)
      </li>
      <li class={hasHeldOut ? "" : "muted"}>
        <i class="key key-held-out" aria-hidden="true" /> Held-out loss (text it never trains on)
      </li>
      {hasReference && (
        <li>
          <i class="key key-reference" aria-hidden="true" /> Knowing only how frequent each token is
        </li>
      )}
    </ul>
  );
}

export function curveInWords(curve: Curve): string {
  const first = curve.train[0];
  const last = curve.train[curve.train.length - 1];
  if (!first || !last) return "Loss curve: no points yet.";
  const held = curve.heldOut;
  const heldText =
    held.length > 1
      ? ` Held-out loss went from ${loss(held[0]!.loss)} to ${loss(held[held.length - 1]!.loss)}.`
      : held.length === 1
        ? ` Held-out loss was ${loss(held[0]!.loss)} at step ${count(held[0]!.step)}.`
        : "";
  return (
    `Loss curve. Training loss went from ${loss(first.loss)} at step ${count(first.step)} ` +
    `to about ${loss(smoothedEnd(curve))} at step ${count(last.step)}.${heldText}`
  );
}

function CurveTable({ curve }: { curve: Curve }) {
  const [open, setOpen] = useState(false);
  return (
    <details class="small" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>The curve as a table</summary>
      {open && <RowsOfCurve curve={curve} />}
    </details>
  );
}

function RowsOfCurve({ curve }: { curve: Curve }) {
  return (
    <table>
      <thead>
        <tr>
          <th scope="col">Step</th>
          <th scope="col">Training loss, smoothed</th>
          <th scope="col">Held-out loss</th>
        </tr>
      </thead>
      <tbody>
        {tableRows(curve).map((row) => (
          <tr key={row.step}>
            <td>{count(row.step)}</td>
            <td>{loss(row.train)}</td>
            <td>{loss(row.heldOut)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

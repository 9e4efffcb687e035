// This computer's contribution to training: over the last day, the last week, and since the beginning.

import type { WorkSummary } from "../api/responses";
import type { WorkDone } from "../api/status";
import { useCallback, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { Card, Stat } from "../components/parts";
import { SpanChart } from "../curve/SpanChart";
import { bigCount, bytes, count, dateAndTime, duration, loss } from "../format";
import type { Span } from "../state/contribution";
import { rows, SPANS, speed, together } from "../state/contribution";
import { useReading } from "../state/reading";

interface Props {
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
}

const NAMES: Record<Span, string> = { day: "Day", week: "Week", all: "All time" };
const IN_WORDS: Record<Span, string> = { day: "in the last 24 hours", week: "in the last 7 days", all: "since the beginning" };
const READ_MS = 5_000;

export function Contribution({ nodeNow, reachable, actions }: Props) {
  const [span, setSpan] = useState<Span>("day");
  const read = useCallback(() => actions.readContribution(span), [actions, span]);
  const gift = useReading<WorkSummary>(read, reachable, span, READ_MS);
  return (
    <div class="view">
      <div class="view-head">
        <h1 class="view-title">Your contribution</h1>
        <div class="switch" role="group" aria-label="Span of time">
          {SPANS.map((name) => (
            <button key={name} type="button" class="button" aria-pressed={name === span} onClick={() => setSpan(name)}>
              {NAMES[name]}
            </button>
          ))}
        </div>
      </div>
      {gift === null ? <p class="muted">Reading the record…</p> : <OfSpan gift={gift} now={nodeNow} />}
    </div>
  );
}

function OfSpan({ gift, now }: { gift: WorkSummary; now: number }) {
  const sum = gift.span === "all" && gift.total ? gift.total : together(gift.points);
  const last = gift.points.filter((point) => point.loss !== null).at(-1);
  return (
    <>
      <p aria-live="off">{sentence(gift, sum)}</p>
      <dl class="stats">
        <Stat label="Tokens read" value={bigCount(sum.tokens)} note={`${count(sum.steps)} learning steps`} />
        <Stat label="Time training" value={duration(sum.training_seconds)} note={IN_WORDS[gift.span]} />
        <Stat label="Tokens per second" value={count(speed(sum))} note="while it trained" />
        <Stat label="To other computers" value={bytes(sum.bytes_sent)} note={`${bytes(sum.bytes_received)} from them`} />
      </dl>
      <Card title="Tokens read" hint={`Of each ${duration(gift.width_seconds)}.`} wide>
        <SpanChart contribution={gift} now={now} kind="bars" value={tokens} shown={short} words={`${bigCount(sum.tokens)} tokens ${IN_WORDS[gift.span]}.`} />
      </Card>
      <div class="grid grid-two">
        <Card title="Speed" hint="Tokens per second while it trained.">
          <SpanChart contribution={gift} now={now} kind="line" value={speed} shown={short} words={`${count(speed(sum))} tokens per second on average.`} />
        </Card>
        <Card title="Loss" hint="How surprised the model was by the text: lower is better.">
          <SpanChart contribution={gift} now={now} kind="line" value={lossOf} shown={loss} words={`Loss at last ${loss(last?.loss)}.`} />
        </Card>
      </div>
      {gift.points.length > 0 && <Table points={gift.points} />}
    </>
  );
}

function sentence({ span, total }: WorkSummary, sum: WorkDone): string {
  if (total === null) return "Nothing is recorded yet: it begins with the first learning step.";
  if (span === "all") return `Recorded since ${dateAndTime(total.start)}, through restarts, of every run of this data folder.`;
  if (sum.tokens === 0) return `It has not trained ${IN_WORDS[span]}.`;
  return `This computer trained for ${duration(sum.training_seconds)} ${IN_WORDS[span]}.`;
}

function Table({ points }: { points: readonly WorkDone[] }) {
  return (
    <details class="small">
      <summary>The same as a table</summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="Contribution as a table">
        <table>
          <thead>
            <tr>
              <th scope="col">From</th>
              <th scope="col">Tokens</th>
              <th scope="col">Tokens/s</th>
              <th scope="col">Loss</th>
              <th scope="col">Time training</th>
              <th scope="col">Sent</th>
              <th scope="col">Received</th>
            </tr>
          </thead>
          <tbody>
            {rows(points).map((work) => (
              <tr key={work.start}>
                <th scope="row">{dateAndTime(work.start)}</th>
                <td>{count(work.tokens)}</td>
                <td>{count(speed(work))}</td>
                <td>{loss(work.loss)}</td>
                <td>{duration(work.training_seconds)}</td>
                <td>{bytes(work.bytes_sent)}</td>
                <td>{bytes(work.bytes_received)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

const tokens = (work: WorkDone) => work.tokens;
const lossOf = (work: WorkDone) => (work.tokens > 0 ? work.loss : null);

/** 12,300 -> "12.3k": short enough for an axis. */
function short(value: number): string {
  if (value >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  return value >= 1e4 ? `${Number((value / 1e3).toPrecision(3))}k` : count(value);
}

// The last microbatches as columns of time, and the way of the one that is chosen, stage by stage.

import type { MicrobatchTrace, PipelineFlow } from "../api/responses";
import { useState } from "preact/hooks";
import { ago, count, plural, shortId, shortTime } from "../format";
import { partsOf, takeoverSentence } from "../words/pipeline";
import { Card } from "./parts";
import { PartsLegend, StageTimes } from "./StageTimes";

interface Props {
  flow: PipelineFlow;
  ownId: string | null;
  nodeNow: number;
}

export function MicrobatchTraces({ flow, ownId, nodeNow }: Props) {
  const { recent } = flow;
  const [pinned, pin] = useState<string | null>(null); // null: whichever is the newest
  const newest = recent[recent.length - 1];
  const chosen = recent.find((trace) => keyOf(trace) === pinned) ?? newest;
  if (!chosen) {
    return (
      <Card title="The last microbatches" wide>
        <p class="muted">No microbatch has gone through all stages yet.</p>
      </Card>
    );
  }
  const longest = Math.max(...recent.map(total), 1e-9);
  return (
    <Card title="The last microbatches" hint="Each column is one microbatch on its way through all stages and back." wide>
      <fieldset class="choices">
        <legend class="hidden-visually">The last microbatches, oldest first; choose one to see its way</legend>
        <div class="traces">
          {recent.map((trace) => (
            <label key={keyOf(trace)} class="trace" title={columnWords(trace, nodeNow)}>
              <input
                type="radio"
                class="hidden-visually"
                name="trace"
                aria-label={columnWords(trace, nodeNow)}
                checked={trace === chosen}
                onChange={() => pin(trace === newest ? null : keyOf(trace))}
              />
              <Column trace={trace} longest={longest} />
            </label>
          ))}
        </div>
      </fieldset>
      <div class="trace-scale small muted">
        <span>older</span>
        <span>the highest took {shortTime(longest)}</span>
        <span>newest</span>
      </div>
      <PartsLegend other />
      <Way trace={chosen} isNewest={chosen === newest} ownId={ownId} nodeNow={nodeNow} />
    </Card>
  );
}

function Column({ trace, longest }: { trace: MicrobatchTrace; longest: number }) {
  const parts = Object.entries(partsOf(trace));
  return (
    <span class="column" aria-hidden="true">
      {hadTrouble(trace) && <i class="column-trouble">!</i>}
      {parts.reverse().map(([name, seconds]) => (
        <i key={name} class={`part part-${name}`} style={{ height: `${(100 * seconds) / longest}%` }} />
      ))}
    </span>
  );
}

function Way({ trace, isNewest, ownId, nodeNow }: { trace: MicrobatchTrace; isNewest: boolean; ownId: string | null; nodeNow: number }) {
  const times = trace.hops.map((hop, stage) => ({ ...hop, stage }));
  const other = trace.other_seconds ?? 0;
  return (
    <section class="way" aria-labelledby="way">
      <h3 id="way">{isNewest ? "The newest one, stage by stage" : `The one of ${ago(trace.ended_at, nodeNow)}, stage by stage`}</h3>
      <p>
        It took {shortTime(trace.seconds)} for {plural(trace.tokens, "token")}
        {other >= 0.01 * (trace.seconds ?? 0) && `, ${shortTime(other)} of it between the stages`}.
        {trace.failures > 0 && ` ${plural(trace.failures, "request")} failed, so another computer was asked.`}
      </p>
      {trace.takeovers.length > 0 && (
        <ul class="text-warn">
          {trace.takeovers.map((takeover, index) => (
            <li key={index}>{takeoverSentence(takeover)}</li>
          ))}
        </ul>
      )}
      <StageTimes times={times} name="Time at each stage" note={({ stage }) => <Who id={times[stage]?.node_id} ownId={ownId} />} />
    </section>
  );
}

function Who({ id, ownId }: { id: string | undefined; ownId: string | null }) {
  return id === ownId ? (
    <>this computer</>
  ) : (
    <span class="mono" title={id}>
      {shortId(id)}
    </span>
  );
}

function keyOf(trace: MicrobatchTrace): string {
  return `${trace.session}:${trace.microbatch}`;
}

function total(trace: MicrobatchTrace): number {
  return Object.values(partsOf(trace)).reduce((sum, seconds) => sum + seconds, 0);
}

function hadTrouble(trace: MicrobatchTrace): boolean {
  return trace.takeovers.length > 0 || trace.failures > 0;
}

function columnWords(trace: MicrobatchTrace, nodeNow: number): string {
  const trouble = hadTrouble(trace) ? `, ${count(Math.max(trace.failures, trace.takeovers.length))} times another computer was asked` : "";
  return `${shortTime(trace.seconds)}, ${ago(trace.ended_at, nodeNow)}${trouble}`;
}

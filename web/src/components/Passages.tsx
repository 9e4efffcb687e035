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

export function Passages({ flow, ownId, nodeNow }: Props) {
  const { recent } = flow;
  const [pinned, pin] = useState<string | null>(null); // null: whichever is the newest
  const newest = recent[recent.length - 1];
  const chosen = recent.find((passage) => keyOf(passage) === pinned) ?? newest;
  if (!chosen) {
    return (
      <Card title="The last microbatches" wide>
        <p class="muted">No microbatch has gone through all stages yet.</p>
      </Card>
    );
  }
  const longest = Math.max(...recent.map(total), 1e-9);
  return (
    <Card title="The last microbatches" hint="Each column is a handful of passages on their way through all stages and back." wide>
      <fieldset class="choices">
        <legend class="hidden-visually">The last microbatches, oldest first; choose one to see its way</legend>
        <div class="passages">
          {recent.map((passage) => (
            <label key={keyOf(passage)} class="passage" title={columnWords(passage, nodeNow)}>
              <input
                type="radio"
                class="hidden-visually"
                name="passage"
                aria-label={columnWords(passage, nodeNow)}
                checked={passage === chosen}
                onChange={() => pin(passage === newest ? null : keyOf(passage))}
              />
              <Column passage={passage} longest={longest} />
            </label>
          ))}
        </div>
      </fieldset>
      <div class="passage-scale small muted">
        <span>older</span>
        <span>the highest took {shortTime(longest)}</span>
        <span>newest</span>
      </div>
      <PartsLegend other />
      <Way passage={chosen} isNewest={chosen === newest} ownId={ownId} nodeNow={nodeNow} />
    </Card>
  );
}

function Column({ passage, longest }: { passage: MicrobatchTrace; longest: number }) {
  const parts = Object.entries(partsOf(passage));
  return (
    <span class="column" aria-hidden="true">
      {hadTrouble(passage) && <i class="column-trouble">!</i>}
      {parts.reverse().map(([name, seconds]) => (
        <i key={name} class={`part part-${name}`} style={{ height: `${(100 * seconds) / longest}%` }} />
      ))}
    </span>
  );
}

function Way({ passage, isNewest, ownId, nodeNow }: { passage: MicrobatchTrace; isNewest: boolean; ownId: string | null; nodeNow: number }) {
  const times = passage.hops.map((hop, stage) => ({ ...hop, stage }));
  const other = passage.other_seconds ?? 0;
  return (
    <section class="way" aria-labelledby="way">
      <h3 id="way">{isNewest ? "The newest one, stage by stage" : `The one of ${ago(passage.ended_at, nodeNow)}, stage by stage`}</h3>
      <p>
        It took {shortTime(passage.seconds)} for {plural(passage.tokens, "token")}
        {other >= 0.01 * (passage.seconds ?? 0) && `, ${shortTime(other)} of it between the stages`}.
        {passage.failures > 0 && ` ${plural(passage.failures, "request")} failed, so another computer was asked.`}
      </p>
      {passage.takeovers.length > 0 && (
        <ul class="text-warn">
          {passage.takeovers.map((takeover, index) => (
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

function keyOf(passage: MicrobatchTrace): string {
  return `${passage.session}:${passage.microbatch}`;
}

function total(passage: MicrobatchTrace): number {
  return Object.values(partsOf(passage)).reduce((sum, seconds) => sum + seconds, 0);
}

function hadTrouble(passage: MicrobatchTrace): boolean {
  return passage.takeovers.length > 0 || passage.failures > 0;
}

function columnWords(passage: MicrobatchTrace, nodeNow: number): string {
  const trouble = hadTrouble(passage) ? `, ${count(Math.max(passage.failures, passage.takeovers.length))} times another computer was asked` : "";
  return `${shortTime(passage.seconds)}, ${ago(passage.ended_at, nodeNow)}${trouble}`;
}

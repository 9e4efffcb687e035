// One round as a row: when, with whom, how it ended, its phases as a bar, bytes, certificate, and what was refused and why.

import type { PhaseSeconds, RunRound } from "../api/responses";
import { ago, bytes, count, dateAndTime, layerRange, shortTime } from "../format";
import { certificateWords, membersWords, outcomeSentence, partWords, PHASES, phaseWords, resultWords, troubleSentences } from "../words/rounds";
import { Arrow } from "./PeerRow";

const TROUBLES_SHOWN = 4;

interface Props {
  round: RunRound;
  longest: number; // seconds, of the rounds in the list
  ownId: string | null;
  nodeNow: number;
  isOfSeveral: boolean; // stages
}

export function RoundRow({ round, longest, ownId, nodeNow, isOfSeveral }: Props) {
  const [result, tone] = resultWords(round);
  return (
    <li class="round">
      <div class="round-head">
        <strong title={round.ended_at === null ? undefined : dateAndTime(round.ended_at)}>{ago(round.ended_at, nodeNow)}</strong>
        <span class={`pill tone-${tone}`}>{result}</span>
        <span>{membersWords(round)}</span>
        <span class="muted small">
          outer step {count(round.outer_step + 1)}
          {isOfSeveral && `, ${layerRange(round.layers)}`}
          {round.views > 1 && `, in ${count(round.views)} tries`}
        </span>
      </div>
      <div class="round-time">
        <Phases round={round} longest={longest} />
        <span class="small">
          <strong>{shortTime(round.seconds)}</strong> <span class="muted">({phaseWords(round.phases)})</span>
        </span>
      </div>
      <div class="round-facts small">
        <span>
          <Arrow up /> {bytes(round.bytes_sent)} <Arrow up={false} /> {bytes(round.bytes_received)}
        </span>
        <span class="muted">
          {partWords(round)}, {round.aggregator} of {round.codec}
        </span>
        {round.certificate && (
          <span title="What was voted on: the same on every computer that agreed">
            certificate <span class="mono">{round.certificate.value}</span> <span class="muted">{certificateWords(round)}</span>
          </span>
        )}
      </div>
      <Troubles round={round} ownId={ownId} />
    </li>
  );
}

function Phases({ round, longest }: { round: RunRound; longest: number }) {
  const names = Object.keys(PHASES) as (keyof PhaseSeconds)[];
  return (
    <span class="parts" aria-hidden="true">
      {names.map((name) => (
        <i key={name} class={`part part-${name}`} style={{ width: `${(100 * (round.phases[name] ?? 0)) / longest}%` }} />
      ))}
    </span>
  );
}

function Troubles({ round, ownId }: { round: RunRound; ownId: string | null }) {
  const outcome = outcomeSentence(round);
  const troubles = troubleSentences(round, ownId);
  if (!outcome && troubles.length === 0) return null;
  const more = troubles.length - TROUBLES_SHOWN;
  return (
    <ul class="round-troubles small">
      {outcome && <li title={round.reason || undefined}>{outcome}</li>}
      {troubles.slice(0, TROUBLES_SHOWN).map((sentence) => (
        <li key={sentence} class="text-warn">
          {sentence}
        </li>
      ))}
      {more > 0 && <li class="muted">and {count(more)} more</li>}
    </ul>
  );
}

/** The meaning of the bars' colours. */
export function PhaseLegend() {
  return (
    <p class="small muted legend">
      {Object.entries(PHASES).map(([name, words]) => (
        <span key={name}>
          <i class={`part-key part-${name}`} aria-hidden="true" /> {words}
        </span>
      ))}
    </p>
  );
}

// Where time goes: a bar for each stage, cut into work, waiting and way.

import type { ComponentChildren } from "preact";
import { shortTime } from "../format";
import { stageName, timeWords, type StageTime } from "../words/pipeline";
import { Pager, usePages } from "./Pager";

const ROWS_SHOWN = 16;
const PARTS = { compute: "at work", wait: "waiting", wire: "on the way" } as const;

interface Props {
  times: readonly StageTime[];
  name: string;
  note: (time: StageTime) => ComponentChildren;
}

export function StageTimes({ times, name, note }: Props) {
  const [shown, pager] = usePages(times, ROWS_SHOWN);
  const longest = Math.max(...times.map(total), 1e-9);
  return (
    <>
      <ol class="stage-times" aria-label={name}>
        {shown.map((time) => (
          <li key={time.stage}>
            <span class="stage-times-name">{stageName(time.stage)}</span>
            <span class="muted small stage-times-note">{note(time)}</span>
            <span class="parts" aria-hidden="true">
              <Part name="compute" seconds={time.compute_seconds} of={longest} />
              <Part name="wait" seconds={time.wait_seconds} of={longest} />
              <Part name="wire" seconds={time.wire_seconds} of={longest} />
            </span>
            <span class="small stage-times-words">
              <strong>{shortTime(total(time))}</strong> <span class="muted">({timeWords(time)})</span>
            </span>
          </li>
        ))}
      </ol>
      <Pager {...pager} name={`Pages: ${name}`} />
    </>
  );
}

function Part({ name, seconds, of }: { name: keyof typeof PARTS; seconds: number | null; of: number }) {
  return <i class={`part part-${name}`} style={{ width: `${(100 * (seconds ?? 0)) / of}%` }} />;
}

function total(time: StageTime): number {
  return (time.compute_seconds ?? 0) + (time.wait_seconds ?? 0) + (time.wire_seconds ?? 0);
}

/** The meaning of the bars' colours; `other` for time between the stages. */
export function PartsLegend({ other = false }: { other?: boolean }) {
  const parts: [string, string][] = Object.entries(PARTS);
  if (other) parts.push(["other", "between the stages"]);
  return (
    <p class="small muted legend">
      {parts.map(([name, words]) => (
        <span key={name}>
          <i class={`part-key part-${name}`} aria-hidden="true" /> {words}
        </span>
      ))}
    </p>
  );
}

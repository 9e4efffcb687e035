// The model's texts for the same prompts at different steps, which show its progress.

import type { SamplesStatus, TextSample } from "../api/responses";
import { useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { ago, count, plural } from "../format";
import { useReading } from "../state/reading";
import { Card } from "./parts";

interface Props {
  steps: number;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
}

const FIRST_SHOWN = 2; // the beginnings, and the newest ones
const LAST_SHOWN = 2;
const READ_MS = 5_000;

export function Progress({ steps, nodeNow, reachable, actions }: Props) {
  const samples = useReading<SamplesStatus>(actions.readSamples, reachable, steps === 0, READ_MS);
  const [all, setAll] = useState(false);
  const [chosen, setChosen] = useState(0);
  useEffect(() => setChosen((at) => Math.min(at, Math.max(0, (samples?.prompts.length ?? 1) - 1))), [samples]);
  if (samples === null) return null;
  const { prompts, explanation } = samples;
  const shown = all ? samples.samples : endsOf(samples.samples);
  const left = samples.samples.length - shown.length;
  return (
    <Card
      title="What it wrote, from the start until now"
      hint="The same beginnings, continued with the likeliest token each time: the better it learned, the more it reads like language."
      wide
    >
      {explanation && <p>{explanation}</p>}
      {samples.samples.length > 0 && (
        <>
          <div class="switch" role="group" aria-label="Beginning of the text">
            {prompts.map((prompt, at) => (
              <button key={prompt} type="button" class="button" aria-pressed={at === chosen} onClick={() => setChosen(at)}>
                {prompt}…
              </button>
            ))}
          </div>
          <ol class="written">
            {shown.map((sample, at) => (
              <li key={sample.time}>
                {left > 0 && at === FIRST_SHOWN && (
                  <p>
                    <button type="button" class="button" onClick={() => setAll(true)}>
                      {plural(left, "sample")} in between
                    </button>
                  </p>
                )}
                <h3>
                  {stepWords(sample)} <span class="muted small">{ago(sample.time, nodeNow)}</span>
                </h3>
                <p class="written-text">
                  <span class="muted">{prompts[chosen]}</span>
                  {sample.texts[chosen]}
                </p>
              </li>
            ))}
          </ol>
        </>
      )}
      {!explanation && <p class="muted small">{nextWords(samples, steps)}</p>}
    </Card>
  );
}

function endsOf(samples: readonly TextSample[]): readonly TextSample[] {
  return samples.length <= FIRST_SHOWN + LAST_SHOWN + 1 ? samples : [...samples.slice(0, FIRST_SHOWN), ...samples.slice(-LAST_SHOWN)];
}

function stepWords({ step, last_step: last }: TextSample): string {
  if (step === 0 && last === 0) return "Before its first step";
  return last > step ? `Steps ${count(step)} to ${count(last)}` : `Step ${count(step)}`;
}

function nextWords({ samples, next_step: next }: SamplesStatus, steps: number): string {
  if (next === null) return "";
  if (samples.length === 0) return "It writes its first sample as soon as it is ready.";
  const when = next > steps ? `at step ${count(next)}` : "soon";
  return `It writes the next sample ${when}; writing takes less than 1 % of its time. Now it is at step ${count(steps)}: ask it yourself above.`;
}

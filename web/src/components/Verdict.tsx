// The answer in one glance: three questions, three sentences.

import type { NodeStatus } from "../api/status";
import { verdictWords } from "../words/verdict";
import { Sentence } from "./Figure";
import { ToneMark } from "./parts";

export function Verdict({ status, nodeNow, gone }: { status: NodeStatus; nodeNow: number; gone: boolean }) {
  const words = verdictWords(status, nodeNow, gone);
  return (
    <section class={`verdict tone-${words.tone}`} aria-labelledby="verdict">
      <h1 id="verdict">{words.headline}</h1>
      <ul class="answers">
        {words.answers.map((answer) => (
          <li key={answer.question} class="answer">
            <ToneMark tone={answer.tone} />
            <div>
              <h2 class="answer-question">
                {answer.question} <span class={`answer-short tone-${answer.tone}`}>{answer.short}</span>
              </h2>
              <p>
                <Sentence said={answer.sentence} />
              </p>
            </div>
          </li>
        ))}
      </ul>
    </section>
  );
}

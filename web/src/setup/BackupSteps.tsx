// The words of a new wallet are shown, then some of them are asked back; after that they are not shown again.

import { useState } from "preact/hooks";
import { Buttons, Fault, Field, useSending } from "./fields";
import type { StepProps } from "./Wizard";

export function WordsStep({ setup, go }: StepProps) {
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        go("check");
      }}
    >
      <h1 tabIndex={-1}>Write these words down</h1>
      <p>
        On paper, in this order. They <strong>are</strong> the wallet: anyone who has them owns it, and without them nobody can bring it back.
        They are shown only now.
      </p>
      <ol class="setup-words">
        {setup.wallet?.words.map((word, index) => (
          <li key={index}>
            <span class="muted small" aria-hidden="true">
              {index + 1}
            </span>
            <span class="mono" translate={false}>
              {word}
            </span>
          </li>
        ))}
      </ol>
      <Buttons next="I have written them down" busy={false} back={() => go("wallet")} />
    </form>
  );
}

export function CheckStep({ setup, calls, go, onChange }: StepProps) {
  const asked = setup.wallet?.asked ?? [];
  const [answers, setAnswers] = useState<string[]>(asked.map(() => ""));
  const { busy, faults, send } = useSending();
  const submit = async () => onChange(await calls.confirm(answers.map((answer) => answer.trim())), "computer");
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        send(submit);
      }}
    >
      <h1 tabIndex={-1}>Check what you have written</h1>
      <p>Read these words off your paper.</p>
      {asked.map((place, index) => (
        <Field
          key={place}
          id={`word-${place}`}
          label={`Word ${place}`}
          value={answers[index] ?? ""}
          onInput={(value) => setAnswers(answers.map((answer, at) => (at === index ? value : answer)))}
          fault={faults.fields[`words.${index}`]}
        />
      ))}
      <Fault id="check-fault" text={faults.other} />
      <Buttons next="Check" busy={busy} back={() => go("words")} backLabel="Show the words again" />
    </form>
  );
}

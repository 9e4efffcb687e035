// When it works, and whether it starts with the computer.

import type { SetupBody } from "../api/bodies";
import { useState } from "preact/hooks";
import { Buttons, Choice, Fault, useSending } from "./fields";
import type { StepProps } from "./Wizard";

export type When = "always" | "idle" | "never";

export function whenOf(setup: SetupBody): When {
  if (setup.settings.training?.value === false) return "never";
  return setup.settings.train_when?.value === "idle" ? "idle" : "always";
}

export const WHEN_WORDS: Record<When, string> = {
  always: "Train now",
  idle: "Train while I do not use the computer",
  never: "Do not train yet",
};

export function WorkStep({ setup, calls, go, onChange }: StepProps) {
  const [when, setWhen] = useState<When>(whenOf(setup));
  const [autostart, setAutostart] = useState(setup.autostart.wanted);
  const { busy, faults, send } = useSending();
  const { training, train_when: trainWhen } = setup.settings;
  const submit = async () => {
    const settings: Record<string, unknown> = {};
    if (!training?.fixed_by) settings.training = when === "never" ? false : null;
    if (trainWhen && !trainWhen.fixed_by && when !== "never") settings.train_when = when === "idle" ? "idle" : null;
    onChange(await calls.choose({ settings, autostart }), "start");
  };
  const choose = (chosen: When) => () => setWhen(chosen);
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        send(submit);
      }}
    >
      <h1 tabIndex={-1}>When may it work?</h1>
      <fieldset>
        <legend>Training</legend>
        <Choice type="radio" name="when" label={WHEN_WORDS.always} about="It gives way to other programs. You can pause it at any time." checked={when === "always"} disabled={Boolean(training?.fixed_by)} onChange={choose("always")} />
        {trainWhen && (
          <Choice type="radio" name="when" label={WHEN_WORDS.idle} about="Some minutes after the last key or mouse movement, until the next one." checked={when === "idle"} disabled={Boolean(trainWhen.fixed_by)} onChange={choose("idle")} />
        )}
        <Choice type="radio" name="when" label={WHEN_WORDS.never} about="Only show me around. Press Resume in the dashboard to begin." checked={when === "never"} disabled={Boolean(training?.fixed_by)} onChange={choose("never")} />
      </fieldset>
      {(training?.fixed_by || trainWhen?.fixed_by) && <p class="muted small">Set by {training?.fixed_by ?? trainWhen?.fixed_by}.</p>}
      <fieldset>
        <legend>Start</legend>
        <Choice
          type="checkbox"
          name="autostart"
          label="Start with the computer"
          about={
            setup.autostart.possible ? (
              <>
                Without opening a page. Off unless you tick it; <code>neuroshard autostart off</code> takes it back.
              </>
            ) : (
              setup.autostart.how
            )
          }
          checked={autostart}
          disabled={!setup.autostart.possible}
          onChange={setAutostart}
        />
      </fieldset>
      <Fault id="work-fault" text={faults.other || Object.values(faults.fields)[0]} />
      <Buttons next="Next" busy={busy} back={() => go("computer")} />
    </form>
  );
}

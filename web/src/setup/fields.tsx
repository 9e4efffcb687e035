// Fields of the wizard: label, hint and what is wrong belong together for those who see and for those who listen.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { NodeError } from "../api/client";

export interface Faults {
  fields: Record<string, string>;
  other: string;
}

const NONE: Faults = { fields: {}, other: "" };

/**
 * Sends something, at most one thing at a time, and keeps what the node found wrong about it.
 *
 * `named` are members of the sent body that have a field of the same name. While `busy`, buttons are `aria-disabled`: a
 * disabled one would lose the focus.
 */
export function useSending(named: readonly string[] = []): { busy: boolean; faults: Faults; clear: () => void; send: (work: () => Promise<void>) => void } {
  const [busy, setBusy] = useState(false);
  const [faults, setFaults] = useState<Faults>(NONE);
  const running = useRef(false);
  useEffect(() => {
    if (faults !== NONE) document.querySelector<HTMLElement>("[aria-invalid=true]")?.focus();
  }, [faults]);
  const send = (work: () => Promise<void>) => {
    if (running.current) return;
    running.current = true;
    setBusy(true);
    setFaults(NONE);
    work()
      .catch((error: unknown) => setFaults(faultsOf(error, named)))
      .finally(() => {
        running.current = false;
        setBusy(false);
      });
  };
  return { busy, faults, clear: () => setFaults(NONE), send };
}

export function faultsOf(error: unknown, named: readonly string[] = []): Faults {
  const other = error instanceof Error ? error.message : String(error);
  if (!(error instanceof NodeError) || Object.keys(error.fields).length === 0) return { fields: {}, other };
  // a place such as "body.phrase" is of a field only if the form names it: the node could not even read what was sent
  const places = Object.entries(error.fields).map(([place, what]) => [named.includes(place.replace("body.", "")) ? place.replace("body.", "") : place, what] as const);
  return places.some(([place]) => place.startsWith("body")) ? { fields: {}, other } : { fields: Object.fromEntries(places), other: "" };
}

export function Field(props: {
  id: string;
  label: string;
  value: string;
  onInput: (value: string) => void;
  fault?: string | undefined;
  hint?: ComponentChildren;
  unit?: string;
  placeholder?: string;
  numeric?: boolean;
  fixedBy?: string | null;
}) {
  const about = [props.hint || props.fixedBy ? `${props.id}-hint` : "", props.fault ? `${props.id}-fault` : ""].filter(Boolean).join(" ");
  return (
    <div class="setup-field">
      <label for={props.id}>{props.label}</label>
      <div class="setup-input">
        <input
          id={props.id}
          value={props.value}
          placeholder={props.placeholder ?? ""}
          disabled={Boolean(props.fixedBy)}
          inputMode={props.numeric ? "decimal" : "text"}
          autocomplete="off"
          autocapitalize="none"
          spellcheck={false}
          aria-invalid={props.fault ? true : undefined}
          aria-describedby={about || undefined}
          onInput={(event) => props.onInput(event.currentTarget.value)}
        />
        {props.unit && <span class="muted">{props.unit}</span>}
      </div>
      {(props.hint || props.fixedBy) && (
        <p class="muted small" id={`${props.id}-hint`}>
          {props.fixedBy ? `Set by ${props.fixedBy}.` : props.hint}
        </p>
      )}
      <Fault id={`${props.id}-fault`} text={props.fault} />
    </div>
  );
}

export function Fault({ id, text }: { id: string; text: string | undefined }) {
  return text ? (
    <p class="text-bad small" id={id} role="alert">
      {text}
    </p>
  ) : null;
}

/** One of several answers, or one that is ticked, with a sentence about it. */
export function Choice(props: {
  type: "radio" | "checkbox";
  name: string;
  label: string;
  about: ComponentChildren;
  checked: boolean;
  disabled?: boolean;
  onChange: (checked: boolean) => void;
}) {
  const id = `choice-${props.name}-${props.label.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return (
    <div class="setup-choice">
      <input
        type={props.type}
        id={id}
        name={props.name}
        checked={props.checked}
        disabled={props.disabled ?? false}
        aria-describedby={`${id}-about`}
        onChange={(event) => props.onChange(event.currentTarget.checked)}
      />
      <div>
        <label for={id}>{props.label}</label>
        <p class="muted small" id={`${id}-about`}>
          {props.about}
        </p>
      </div>
    </div>
  );
}

export function Buttons(props: { next: string; busy: boolean; back?: (() => void) | undefined; backLabel?: string }) {
  return (
    <div class="setup-buttons">
      <button type="submit" class="button button-primary" aria-disabled={props.busy}>
        {props.next}
      </button>
      {props.back && (
        <button type="button" class="button" onClick={props.back}>
          {props.backLabel ?? "Back"}
        </button>
      )}
    </div>
  );
}

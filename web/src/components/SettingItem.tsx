// One setting: its value, where that comes from, and a field to change it, with any error next to it.

import { useEffect, useRef, useState } from "preact/hooks";
import type { SettingRow } from "../views/setting-rows";
import { actionOf } from "./parts";
import { rangeWords, shownValue, typedText, typedValue } from "../views/setting-rows";

interface Props {
  row: SettingRow;
  reachable: boolean;
  save: (row: SettingRow, value: unknown) => Promise<void>; // rejects with what is wrong
}

const SOURCES: Record<string, string> = {
  default: "default",
  flag: "given at the start",
  environment: "environment variable",
  "config.toml": "stored here",
};

export function SettingItem({ row, reachable, save }: Props) {
  const [text, setText] = useState<string | null>(null);
  const [problem, setProblem] = useState("");
  const change = useRef<HTMLButtonElement>(null);
  const wasOpen = useRef(false);
  const isOpen = text !== null;
  useEffect(() => {
    if (wasOpen.current && !isOpen) change.current?.focus();
    wasOpen.current = isOpen;
  }, [isOpen]);
  const close = () => {
    setText(null);
    setProblem("");
  };
  const submit = async () => {
    if (text === null || !reachable) return;
    try {
      await save(row, typedValue(text));
      close();
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };
  const set = async (value: unknown) => {
    try {
      await save(row, value);
      setProblem("");
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };
  const hasField = row.control === "number" || row.control === "list" || row.control === "text";
  return (
    <li class="setting">
      <div class="setting-line">
        <div>
          <h3 id={`name-${row.name}`}>{row.title}</h3>
          <p class="muted small">{row.sentence}</p>
        </div>
        {row.control === "switch" ? (
          <Switch row={row} reachable={reachable} set={set} />
        ) : row.control === "choice" ? (
          <Choice row={row} reachable={reachable} set={set} />
        ) : (
          <p>
            <b>{row.shown}</b>
          </p>
        )}
        {hasField && !isOpen && (
          <button
            type="button"
            class="button"
            ref={change}
            aria-label={`Change ${row.title}`}
            {...actionOf(!reachable, () => setText(typedText(row)))}
          >
            Change
          </button>
        )}
      </div>
      <p class="muted small setting-source">
        <span class="mono">{row.name}</span> · {SOURCES[row.source] ?? row.source}
        {row.control === "choice" && "in_use" in row && ` · in use: ${row.shown}`}
      </p>
      {row.later !== null && (
        <p class="small text-warn">
          After a restart: <b>{row.later}</b>. Until then {row.shown}.
        </p>
      )}
      {row.control === "none" && <p class="small muted">{elsewhere(row)}</p>}
      {isOpen && <Field {...{ row, text, problem, reachable, setText, submit, close }} />}
      {problem && !isOpen && (
        <p class="small text-bad" role="alert">
          {problem}
        </p>
      )}
    </li>
  );
}

interface ControlProps {
  row: SettingRow;
  reachable: boolean;
  set: (value: unknown) => Promise<void>;
}

/** The stored value: for a change that waits for a restart, that one. */
function stored(row: SettingRow): unknown {
  return "after_restart" in row ? row.after_restart : row.value;
}

function Switch({ row, reachable, set }: ControlProps) {
  const isOn = stored(row) === true;
  return (
    <button
      type="button"
      class="switch-control"
      role="switch"
      aria-checked={isOn}
      aria-labelledby={`name-${row.name}`}
      {...actionOf(!reachable, () => void set(!isOn))}
    >
      <span class="switch-track" aria-hidden="true" />
      {shownValue(isOn)}
    </button>
  );
}

function Choice({ row, reachable, set }: ControlProps) {
  const choose = (field: HTMLSelectElement) => {
    if (!reachable) {
      field.value = String(stored(row));
      return;
    }
    void set(field.value);
  };
  return (
    <select aria-labelledby={`name-${row.name}`} value={String(stored(row))} aria-disabled={!reachable} onChange={(event) => choose(event.currentTarget)}>
      {row.choices.map((choice) => (
        <option key={choice} value={choice}>
          {choice}
        </option>
      ))}
    </select>
  );
}

/** Why a page cannot change this setting, and how its owner does. */
function elsewhere({ name, owner, applies }: SettingRow): string {
  if (name === "token") return "A secret: it is never typed into a page.";
  if (owner === "") return `Set ${applies}.`;
  return `No page can change it. Use ${owner.replaceAll("`", "")}${owner.includes("config.toml") ? "" : ", or config.toml"}.`;
}

interface FieldProps {
  row: SettingRow;
  text: string;
  problem: string;
  reachable: boolean;
  setText: (text: string) => void;
  submit: () => Promise<void>;
  close: () => void;
}

function Field({ row, text, problem, reachable, setText, submit, close }: FieldProps) {
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);
  useEffect(() => {
    if (problem) field.current?.focus();
  }, [problem]);
  const shared = {
    ref: field,
    "aria-labelledby": `name-${row.name}`,
    "aria-describedby": `hint-${row.name}${problem ? ` problem-${row.name}` : ""}`,
    "aria-invalid": problem !== "",
    value: text,
  };
  return (
    <form
      class="setting-form"
      onSubmit={(event) => {
        event.preventDefault();
        void submit();
      }}
      onKeyDown={(event) => {
        if (event.key === "Escape") close();
      }}
    >
      <input
        {...shared}
        type="text"
        inputMode={row.control === "number" ? "decimal" : "text"}
        autocomplete="off"
        spellcheck={false}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      {row.unit && <span class="muted">{row.unit}</span>}
      <div class="setting-buttons">
        <button type="submit" class="button button-primary" aria-disabled={!reachable}>
          Save
        </button>
        <button type="button" class="button" onClick={close}>
          Cancel
        </button>
      </div>
      <p class="small muted" id={`hint-${row.name}`}>
        {rangeWords(row)} {row.may_be_unset ? `Empty: ${row.unset || "not set"}.` : "Empty: the default."} A change takes effect {row.applies}.
      </p>
      {problem && (
        <p class="small text-bad" id={`problem-${row.name}`} role="alert">
          {problem}
        </p>
      )}
    </form>
  );
}

// One setting: its value, where that comes from, and a field to change it, with any error next to it.

import { useEffect, useRef, useState } from "preact/hooks";
import type { SettingRow } from "../views/setting-rows";
import { shownValue, typedText } from "../views/setting-rows";

interface Props {
  row: SettingRow;
  reachable: boolean;
  save: (name: string, text: string) => Promise<void>; // rejects with what is wrong
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
    if (text === null) return;
    try {
      await save(row.name, text);
      close();
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <li class="setting">
      <div class="setting-line">
        <div>
          <h3 id={`name-${row.name}`}>{row.title}</h3>
          <p class="mono muted small">{row.name}</p>
        </div>
        <p>
          <b>{row.shown}</b> <span class="muted small">{SOURCES[row.source] ?? row.source}</span>
        </p>
        {row.editable && !isOpen && (
          <button
            type="button"
            class="button"
            ref={change}
            disabled={!reachable}
            aria-label={`Change ${row.title}`}
            onClick={() => setText(typedText(row))}
          >
            Change
          </button>
        )}
      </div>
      {row.later !== null && (
        <p class="small text-warn">
          After a restart: <b>{row.later}</b>. Until then {row.shown}.
        </p>
      )}
      {!row.editable && <p class="small muted">{elsewhere(row)}</p>}
      {isOpen && <Field {...{ row, text, problem, reachable, setText, submit, close }} />}
    </li>
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
  const field = useRef<HTMLInputElement & HTMLSelectElement>(null);
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
      {row.choices.length > 0 ? (
        <select {...shared} onChange={(event) => setText(event.currentTarget.value)}>
          {row.choices.map((choice) => (
            <option key={choice} value={choice}>
              {choice === "true" || choice === "false" ? shownValue(choice === "true") : choice}
            </option>
          ))}
          <option value="">the default</option>
        </select>
      ) : (
        <input {...shared} type="text" autocomplete="off" spellcheck={false} onInput={(event) => setText(event.currentTarget.value)} />
      )}
      <div class="setting-buttons">
        <button type="submit" class="button button-primary" disabled={!reachable}>
          Save
        </button>
        <button type="button" class="button" onClick={close}>
          Cancel
        </button>
      </div>
      <p class="small muted" id={`hint-${row.name}`}>
        Allowed: {row.allowed}. {row.choices.length > 0 ? "" : "Empty: the default. "}A change holds {row.applies}.
      </p>
      {problem && (
        <p class="small text-bad" id={`problem-${row.name}`} role="alert">
          {problem}
        </p>
      )}
    </form>
  );
}

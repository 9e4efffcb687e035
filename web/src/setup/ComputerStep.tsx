// Where the node keeps its things and what it may use.

import type { PresetBody, SetupField } from "../api/bodies";
import { useState } from "preact/hooks";
import { typedValue } from "../views/setting-rows";
import { gpuWords, lineWords, OWN_LIMITS, PRESET_LABEL, presetEffects, PRESETS } from "../words/presets";
import { Buttons, Choice, Fault, Field, useSending } from "./fields";
import type { StepProps } from "./Wizard";

interface Limit {
  name: string;
  label: string;
  unit: string;
  about: (measured: string | null) => string;
}

const proposed = (words: string) => (measured: string | null) => (measured === null ? words : `Empty: ${measured}, ${words}`);

export const LIMITS: readonly Limit[] = [
  { name: "memory", label: "Memory", unit: "MB", about: proposed("all but a reserve for you.") },
  { name: "cpu_threads", label: "Processor threads", unit: "", about: proposed("one for each core.") },
  { name: "max_storage", label: "Space for training text", unit: "MB", about: proposed("on the disk of the data folder.") },
  { name: "max_upload", label: "Upload", unit: "Mbit/s", about: () => "Most that this computer sends to others. Empty: no limit." },
  { name: "monthly_quota", label: "Data per month", unit: "GB", about: () => "Sent and received together. Empty: no limit." },
];

export function ComputerStep({ setup, calls, go, onChange }: StepProps) {
  const { folder, settings } = setup;
  const limits = LIMITS.filter(({ name }) => name in settings);
  const [path, setPath] = useState(folder.path);
  const { presets, chosen, line } = setup.presets;
  const [preset, setPreset] = useState<PresetBody | null>(presets.find(({ name }) => name === chosen) ?? null);
  const [texts, setTexts] = useState<Record<string, string>>(() =>
    Object.fromEntries(limits.map(({ name }) => [name, textOf(settings[name])])),
  );
  const shown = (name: string) => (preset && name in preset.settings ? text(preset.settings[name]) : (texts[name] ?? ""));
  const own = () => {
    const upload = preset?.upload ?? null;
    const limited = upload === null ? {} : { max_upload: String(Number(upload.toPrecision(2))) };
    setTexts({ ...Object.fromEntries(limits.map(({ name }) => [name, shown(name)])), ...limited });
    setPreset(null);
  };
  const { busy, faults, send } = useSending();
  const submit = async () => {
    const free = limits.filter(({ name }) => !settings[name]?.fixed_by);
    const values = Object.fromEntries(free.map(({ name }) => [name, typedValue(shown(name))]));
    // Own limits take back all of a preset that was chosen before, also what has no field here.
    const chosenBefore = Object.fromEntries(Object.keys(presets[0]?.settings ?? {}).map((name) => [name, null]));
    const changed = await calls.choose({ data_dir: path, settings: preset ? { ...values, ...preset.settings } : { ...chosenBefore, ...values } });
    const other = changed.folder.wallet_id;
    onChange(changed, other === null || other === changed.wallet?.wallet_id ? "work" : undefined);
  };
  const useFound = async () => onChange(await calls.chooseWallet("found"), "work");
  const free = folder.free_mb === null ? "" : ` ${(folder.free_mb / 1000).toFixed(1)} GB are free there.`;
  const holdsAnother = folder.wallet_id !== null && folder.wallet_id !== setup.wallet?.wallet_id && path === folder.path;
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        send(submit);
      }}
    >
      <h1 tabIndex={-1}>What may it use?</h1>
      <p>You can change everything later.</p>
      <Field
        id="data_dir"
        label="Data folder"
        value={path}
        onInput={setPath}
        fault={faults.fields.data_dir}
        fixedBy={folder.fixed_by}
        hint={`Saved states of the model, training text, keys and logs.${path === folder.path ? free : ""}`}
      />
      {holdsAnother && (
        <div class="banner tone-warn" role="alert">
          <div class="banner-text">
            This folder holds the wallet <span class="mono">{folder.wallet_id?.slice(0, 8)}</span> already. Use that one, or another folder.
          </div>
          <button type="button" class="button" onClick={() => send(useFound)}>
            Use that wallet
          </button>
        </div>
      )}
      <fieldset>
        <legend>{PRESET_LABEL}</legend>
        {presets.map((each) => (
          <Choice key={each.name} type="radio" name="preset" label={PRESETS[each.name]} about={presetEffects(each)} checked={preset?.name === each.name} onChange={() => setPreset(each)} />
        ))}
        <Choice type="radio" name="preset" label={OWN_LIMITS} about="Set each limit below." checked={preset === null} onChange={own} />
      </fieldset>
      <p class="muted small">
        {gpuWords(setup.gpus)} {lineWords(line)}
      </p>
      <div class="setup-limits">
        {limits.filter(({ name }) => preset === null || !(name in preset.settings)).map(({ name, label, unit, about }) => (
          <Field
            key={name}
            id={name}
            label={unit ? `${label} (${unit})` : label}
            numeric
            value={shown(name)}
            placeholder={measured(settings[name]) ?? "no limit"}
            onInput={(value) => setTexts({ ...texts, [name]: value })}
            fault={faults.fields[name]}
            fixedBy={settings[name]?.fixed_by ?? null}
            hint={about(measured(settings[name]))}
          />
        ))}
      </div>
      <Fault id="computer-fault" text={faults.other} />
      <Buttons next="Next" busy={busy} back={() => go("wallet")} />
    </form>
  );
}

function textOf(field: SetupField | undefined): string {
  return text(field?.value);
}

function text(value: unknown): string {
  return value == null ? "" : String(value);
}

export function measured(field: SetupField | undefined): string | null {
  return typeof field?.measured === "number" ? field.measured.toLocaleString("en") : null;
}

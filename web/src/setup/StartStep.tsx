// A summary of the choices; then everything is stored, and the node takes the wizard's place at this address.

import type { SetupBody } from "../api/bodies";
import { useEffect, useState } from "preact/hooks";
import { NEARBY, textWords } from "../arrival/words";
import { Facts } from "../components/parts";
import { uploadWords } from "../words/presets";
import { LIMITS, measured } from "./ComputerStep";
import { Buttons, Fault, useSending } from "./fields";
import type { SetupCalls } from "./setup";
import { WHEN_WORDS, whenOf } from "./WorkStep";
import type { StepProps } from "./Wizard";

const ASK_MS = 400;
const PATIENCE_MS = 60_000;

export function StartStep({ setup, calls, go }: StepProps) {
  const { busy, faults, send } = useSending();
  const [warning, setWarning] = useState<string | null>(null);
  const [url, setUrl] = useState<string | null>(null);
  const submit = async () => {
    const done = await calls.finish();
    setWarning(done.warning);
    setUrl(done.url);
  };
  if (url !== null) return <Starting url={url} warning={warning} calls={calls} />;
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        send(submit);
      }}
    >
      <h1 tabIndex={-1}>Ready to start</h1>
      <p>Nothing is stored before you press Start. Then the wallet is kept in a file that only you can read.</p>
      <Facts rows={rowsOf(setup)} />
      {setup.wallet?.warning && <p class="text-warn small">{setup.wallet.warning}</p>}
      <Fault id="start-fault" text={faults.other || Object.values(faults.fields).join(" ")} />
      <Buttons next={busy ? "Storing…" : "Start"} busy={busy} back={() => go("work")} />
    </form>
  );
}

function rowsOf(setup: SetupBody): [string, string][] {
  const preset = setup.presets.presets.find(({ name }) => name === setup.presets.chosen);
  const limits = LIMITS.flatMap(({ name, label, unit }): [string, string][] => {
    const field = setup.settings[name];
    if (!field) return [];
    if (name === "max_upload" && preset?.upload != null) return [[label, uploadWords(preset.upload)]];
    const value = typeof field.value === "number" ? field.value.toLocaleString("en") : measured(field);
    return [[label, value === null ? "no limit" : `${value} ${unit}`.trim()]];
  });
  return [
    ...purposeOf(setup),
    ["Wallet", setup.wallet?.wallet_id.slice(0, 8) ?? "–"],
    ["Data folder", setup.folder.path],
    ...limits,
    ["Training", WHEN_WORDS[whenOf(setup)]],
    ["Start with the computer", setup.autostart.wanted ? "yes" : "no"],
  ];
}

function purposeOf({ arrival }: SetupBody): [string, string][] {
  if (arrival.purpose === "join" && arrival.invitation) return [["Run", arrival.invitation.name || arrival.invitation.run_id.slice(0, 8)]];
  if (arrival.purpose === "nearby" && arrival.nearby_run) return [["Run", `${NEARBY.name(arrival.nearby_run)}, when its owner lets this computer in`]];
  return arrival.purpose === "text" && arrival.text ? [["Text", `${arrival.text.path} (${textWords(arrival.text)})`]] : [];
}

export function Starting({ url, warning, calls }: { url: string; warning: string | null; calls: SetupCalls }) {
  const [late, setLate] = useState(false);
  useEffect(() => {
    if (warning !== null) return; // its reader opens the dashboard
    return whenStarted(url, calls, () => setLate(true));
  }, [url, calls, warning]);
  return (
    <div role="status">
      <h1 tabIndex={-1}>NeuroShard starts</h1>
      {warning !== null && (
        <>
          <p class="text-warn">One thing did not work: {warning}</p>
          <div class="setup-buttons">
            <a class="button button-primary" href={url} onClick={() => setTimeout(() => location.reload(), 0)}>
              Open the dashboard
            </a>
          </div>
        </>
      )}
      {warning === null && <p class="muted">Everything is stored. The dashboard opens here in a moment.</p>}
      {late && (
        <p class="text-bad" role="alert">
          It does not answer. Start NeuroShard once more: it keeps your choices and shows in a terminal what is wrong.
        </p>
      )}
    </div>
  );
}

/** Ask until the node answers; its address may be another one, when a stored setting wants that. */
function whenStarted(url: string, calls: SetupCalls, onLate: () => void): () => void {
  const end = Date.now() + PATIENCE_MS;
  const ask = async () => {
    if (new URL(url).port !== location.port) return location.assign(url);
    if (await calls.isNode()) {
      location.replace(new URL(url).hash); // the node's key: another data folder has another secret than the wizard
      return calls.openDashboard();
    }
    if (Date.now() > end) onLate();
    timer = window.setTimeout(() => void ask(), ASK_MS);
  };
  let timer = window.setTimeout(() => void ask(), ASK_MS);
  return () => clearTimeout(timer);
}

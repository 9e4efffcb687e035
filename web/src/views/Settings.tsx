// The settings of this computer's node, where each value comes from, and a way to change them.

import { useCallback, useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { Card, Facts } from "../components/parts";
import { dateAndTime, runningFor } from "../format";
import type { NodeStatus } from "../state/node";
import type { Setting, SettingRow } from "./setting-rows";
import { settingRows, typedValue } from "./setting-rows";

interface Props {
  status: NodeStatus;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
  onMessage: (text: string, failed: boolean) => void;
}

export function Settings({ status, nodeNow, reachable, actions, onMessage }: Props) {
  return (
    <div class="view">
      <h1 class="view-title">Settings</h1>
      <Card title="This node">
        <Facts
          rows={[
            ["Version", status.version],
            ["Started", `${dateAndTime(status.started_at)} (${runningFor(status, nodeNow)} ago)`],
            ["Node", <span class="mono">{status.node_id ?? "–"}</span>],
            ["Wallet", <span class="mono">{status.wallet_id ?? "–"}</span>],
            ["Data folder", <span class="mono">{status.data_dir || "–"}</span>],
          ]}
        />
      </Card>
      <SettingsTable reachable={reachable} actions={actions} onMessage={onMessage} />
    </div>
  );
}

function SettingsTable({ reachable, actions, onMessage }: Pick<Props, "reachable" | "actions" | "onMessage">) {
  const [config, setConfig] = useState<Record<string, Setting> | null>(null);
  const [problem, setProblem] = useState("");
  const read = useCallback(() => {
    actions.readSettings().then(setConfig, (error: unknown) => setProblem(words(error)));
  }, [actions]);
  useEffect(read, [read]);
  const save = async (name: string, text: string) => {
    try {
      onMessage(await actions.changeSetting(name, typedValue(text)), false);
      read();
      return true;
    } catch (error) {
      onMessage(words(error), true);
      return false;
    }
  };
  const hint = "Flags win over environment variables, those over config.toml in the data folder, that over the defaults.";
  return (
    <Card title="What you can set" hint={hint} wide>
      {problem && <p class="text-bad">{problem}</p>}
      {!problem && config === null && <p class="muted">Reading the settings…</p>}
      {config && (
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th scope="col">Setting</th>
                <th scope="col">Value</th>
                <th scope="col">Comes from</th>
                <th scope="col">A change holds</th>
                <th scope="col">
                  <span class="hidden-visually">Change</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {settingRows(config).map((row) => (
                <Row key={row.name} row={row} reachable={reachable} save={save} />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

function Row({ row, reachable, save }: { row: SettingRow; reachable: boolean; save: (name: string, text: string) => Promise<boolean> }) {
  const [text, setText] = useState<string | null>(null);
  const form = `set-${row.name}`;
  const submit = async () => {
    if (text !== null && (await save(row.name, text))) setText(null);
  };
  return (
    <tr>
      <th scope="row" class="mono">
        {row.name}
      </th>
      <td class="mono">
        {text === null ? (
          row.shown
        ) : (
          <form
            id={form}
            onSubmit={(event) => {
              event.preventDefault();
              void submit();
            }}
          >
            <input aria-label={row.name} autofocus value={text} onInput={(event) => setText(event.currentTarget.value)} />
            <small class="muted">{row.allowed}; empty: the default</small>
          </form>
        )}
      </td>
      <td>{row.source}</td>
      <td class="muted">{row.applies}</td>
      <td class="row-actions">
        {row.editable && text === null && (
          <button
            type="button"
            class="button"
            disabled={!reachable}
            aria-label={`Change ${row.name}`}
            onClick={() => setText(row.value == null ? "" : String(row.value))}
          >
            Change
          </button>
        )}
        {text !== null && (
          <>
            <button type="submit" form={form} class="button button-primary" disabled={!reachable}>
              Save
            </button>
            <button type="button" class="button" onClick={() => setText(null)}>
              Cancel
            </button>
          </>
        )}
      </td>
    </tr>
  );
}

function words(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

// The settings of this computer's node, where each value comes from, and a way to change them.

import type { NodeStatus } from "../api/status";
import { useCallback, useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { actionOf, Banner, Card } from "../components/parts";
import { SettingItem } from "../components/SettingItem";
import { listed } from "../format";
import { RESTART_NOW } from "../words/presets";
import type { Setting, SettingGroup, SettingRow } from "./setting-rows";
import { settingGroups } from "./setting-rows";

interface Props {
  status: NodeStatus;
  reachable: boolean;
  actions: NodeActions;
  onMessage: (text: string, failed: boolean) => void;
}

export function Settings({ status, reachable, actions, onMessage }: Props) {
  return (
    <div class="view">
      <h1 class="view-title">Settings</h1>
      <AllSettings key={status.started_at} reachable={reachable} actions={actions} onMessage={onMessage} />
    </div>
  );
}

function AllSettings({ reachable, actions, onMessage }: Pick<Props, "reachable" | "actions" | "onMessage">) {
  const [config, setConfig] = useState<Record<string, Setting> | null>(null);
  const [problem, setProblem] = useState("");
  const read = useCallback(async () => {
    try {
      setConfig(await actions.readSettings());
      setProblem("");
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  }, [actions]);
  useEffect(() => {
    if (reachable) void read();
  }, [read, reachable]);
  const [search, setSearch] = useState("");
  const [withAdvanced, setWithAdvanced] = useState(false);
  const save = async (row: SettingRow, value: unknown) => {
    onMessage(await actions.changeSettings({ [row.name]: value }), false);
    await read();
  };
  const restart = async () => {
    try {
      onMessage(await actions.restart(), false);
    } catch (error) {
      onMessage(error instanceof Error ? error.message : String(error), true);
    }
  };
  if (config === null) return <p class={problem ? "text-bad" : "muted"}>{problem || "Reading the settings…"}</p>;
  const groups = settingGroups(config, search, withAdvanced);
  return (
    <>
      <Waiting groups={groups} reachable={reachable} restart={() => void restart()} />
      <div class="peer-options">
        <label>
          <span>Find</span>
          <input type="search" value={search} onInput={(event) => setSearch(event.currentTarget.value)} />
        </label>
        <label class="check">
          <input type="checkbox" checked={withAdvanced} onChange={(event) => setWithAdvanced(event.currentTarget.checked)} />
          <span>Show all settings</span>
        </label>
      </div>
      {groups.length === 0 && <p role="status">No setting contains these words.</p>}
      <div class="settings">
        {groups.map((group) => (
          <Card key={group.title} title={group.title}>
            <ul>
              {group.rows.map((row) => (
                <SettingItem key={row.name} row={row} reachable={reachable} save={save} />
              ))}
            </ul>
          </Card>
        ))}
      </div>
    </>
  );
}

function Waiting({ groups, reachable, restart }: { groups: readonly SettingGroup[]; reachable: boolean; restart: () => void }) {
  const waiting = groups.flatMap((group) => group.rows.filter((row) => row.later !== null).map((row) => row.title));
  if (waiting.length === 0) return null;
  return (
    <Banner tone="busy" title="Stored. It takes effect after a restart:">
      {listed(waiting)}. Finished steps are kept.{" "}
      <button type="button" class="button" {...actionOf(!reachable, restart)}>
        {RESTART_NOW}
      </button>
    </Banner>
  );
}

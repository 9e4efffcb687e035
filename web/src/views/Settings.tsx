// The settings of this computer's node, where each value comes from, and a way to change them.

import type { NodeStatus } from "../api/status";
import { useCallback, useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { Banner, Card, Facts } from "../components/parts";
import { SettingItem } from "../components/SettingItem";
import { dateAndTime, listed, runningFor } from "../format";
import type { Setting, SettingGroup } from "./setting-rows";
import { settingGroups, typedValue } from "./setting-rows";

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
      <AllSettings key={status.started_at} reachable={reachable} actions={actions} onMessage={onMessage} />
      <Card title="This node">
        <Facts
          rows={[
            ["Version", status.version],
            ["Started", `${dateAndTime(status.started_at)} (${runningFor(status, nodeNow)} ago)`],
            ["Node", <span class="mono">{status.node_id ?? "–"}</span>],
            ["Wallet", <span class="mono">{status.wallet_id?.slice(0, 8) ?? "–"}</span>],
            ["Data folder", <span class="mono">{status.data_dir || "–"}</span>],
          ]}
        />
      </Card>
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
  const save = async (name: string, text: string) => {
    onMessage(await actions.changeSetting(name, typedValue(text)), false);
    await read();
  };
  if (config === null) return <p class={problem ? "text-bad" : "muted"}>{problem || "Reading the settings…"}</p>;
  const groups = settingGroups(config);
  return (
    <>
      <Waiting groups={groups} />
      <p class="muted small">
        Options given at the start override environment variables. Those override the settings stored here (config.toml in the data
        folder), which override the defaults.
      </p>
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

function Waiting({ groups }: { groups: readonly SettingGroup[] }) {
  const waiting = groups.flatMap((group) => group.rows.filter((row) => row.later !== null).map((row) => row.title));
  if (waiting.length === 0) return null;
  return (
    <Banner tone="busy" title="Stored, and in force after a restart:">
      {listed(waiting)}. Stop the node and start it again when it suits you; finished steps are kept.
    </Banner>
  );
}

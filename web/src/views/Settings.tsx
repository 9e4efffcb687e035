// The settings of this computer's node and where each value comes from.

import { useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { Card, Facts } from "../components/parts";
import { dateAndTime, duration } from "../format";
import type { NodeStatus } from "../state/node";
import { settingRows } from "./setting-rows";

interface Props {
  status: NodeStatus;
  nodeNow: number;
  actions: NodeActions;
}

export function Settings({ status, nodeNow, actions }: Props) {
  const [config, setConfig] = useState<unknown>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    actions.readSettings().then(setConfig, (error: unknown) => setProblem(error instanceof Error ? error.message : String(error)));
  }, [actions]);
  const rows = settingRows(config);
  return (
    <div class="view">
      <h1 class="view-title">Settings</h1>
      <Card title="This node">
        <Facts
          rows={[
            ["Version", status.version],
            ["Started", `${dateAndTime(status.started_at)} (${duration(nodeNow - status.started_at)} ago)`],
            ["Node", <span class="mono">{status.node_id ?? "–"}</span>],
            ["Wallet", <span class="mono">{status.wallet_id ?? "–"}</span>],
            ["Data folder", <span class="mono">{status.data_dir || "–"}</span>],
          ]}
        />
      </Card>
      <Card
        title="Settings"
        hint="Flags win over environment variables, those over config.toml in the data folder, that over the defaults."
        wide
      >
        {problem && <p class="text-bad">{problem}</p>}
        {!problem && rows.length === 0 && <p class="muted">Reading the settings…</p>}
        <div class="scroll">
          {rows.length > 0 && (
            <table>
              <thead>
                <tr>
                  <th scope="col">Setting</th>
                  <th scope="col">Value</th>
                  <th scope="col">Comes from</th>
                </tr>
              </thead>
              <tbody>
                {rows.map((row) => (
                  <tr key={row.name}>
                    <th scope="row" class="mono">
                      {row.name}
                    </th>
                    <td class="mono">{row.value}</td>
                    <td>{row.source}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          )}
        </div>
      </Card>
    </div>
  );
}

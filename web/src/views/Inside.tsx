// The three views for those who look inside: the model, the network, and the files on this computer.

import type { NodeStatus } from "../api/status";
import type { NodeActions } from "../api/actions";
import { ComputerCard } from "../components/cards";
import { Feed } from "../components/Feed";
import { Machines } from "../components/Machines";
import { OwnerPolicyCard } from "../components/OwnerPolicyCard";
import { Card, Facts, Section } from "../components/parts";
import { dateAndTime, runningFor, walletName } from "../format";
import type { Dashboard } from "../state/store";
import { useReading } from "../state/reading";
import { Checkpoints } from "./Checkpoints";
import { Data } from "./Data";
import { Log } from "./Log";
import { Pipeline } from "./Pipeline";
import { Rounds } from "./Rounds";
import { Swarm } from "./Swarm";
import { Training } from "./Training";

export interface InsideProps {
  dashboard: Dashboard;
  status: NodeStatus;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
  say: (text: string, failed: boolean) => void;
}

export function Model({ dashboard, status, nodeNow, reachable, actions }: InsideProps) {
  return (
    <div class="view">
      <h1 class="view-title">Model</h1>
      <Training {...{ dashboard, status, nodeNow }} />
      <Pipeline {...{ status, nodeNow, reachable, actions }} />
    </div>
  );
}

export function Network({ dashboard, status, nodeNow, reachable, actions }: InsideProps) {
  const feed = useReading(actions.readFeed, reachable, status.feed.length);
  return (
    <div class="view">
      <h1 class="view-title">Network</h1>
      <Machines {...{ nodeNow, reachable, actions }} />
      <Swarm {...{ dashboard, status, nodeNow }} />
      <Rounds {...{ status, nodeNow, reachable, actions }} />
      <Section title="Events">
        <Card title="Since this start" wide>
          <Feed events={feed?.events ?? status.feed} since={status.started_at} />
        </Card>
      </Section>
    </div>
  );
}

export function Files({ dashboard, status, nodeNow, reachable, actions, say }: InsideProps) {
  return (
    <div class="view">
      <h1 class="view-title">Files</h1>
      <Data {...{ status, nodeNow }} />
      <Checkpoints {...{ status, nodeNow, reachable, actions }} onMessage={say} />
      <Section title="Computer">
        <div class="grid">
          <ComputerCard status={status} />
          <OwnerPolicyCard policy={status.owner_policy} />
          <ThisNode status={status} nodeNow={nodeNow} />
        </div>
      </Section>
      <Log {...{ logs: dashboard.logs, reachable, actions }} onMessage={say} />
    </div>
  );
}

function ThisNode({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  return (
    <Card title="This node">
      <Facts
        rows={[
          ["Version", status.version],
          ["Started", `${dateAndTime(status.started_at)} (${runningFor(status, nodeNow)} ago)`],
          ["Node", <span class="mono">{status.node_id ?? "–"}</span>],
          ["Wallet", <span class="mono">{walletName(status.wallet_id)}</span>],
          ["Data folder", <span class="mono">{status.data_dir || "–"}</span>],
        ]}
      />
    </Card>
  );
}

// The first view, for everybody: the verdict, one chart, this computer's contribution, the others, and the events.

import type { NodeStatus } from "../api/status";
import { Card } from "../components/parts";
import { Feed } from "../components/Feed";
import { Company, Limits, OwnWork } from "../components/home";
import { Startup } from "../components/Startup";
import { Verdict } from "../components/Verdict";
import { LossCurve } from "../curve/LossCurve";
import type { Dashboard } from "../state/store";

interface Props {
  dashboard: Dashboard;
  status: NodeStatus;
  nodeNow: number;
}

export function Home({ dashboard, status, nodeNow }: Props) {
  const { training } = status;
  const starting = status.state === "starting" || (training.steps === 0 && status.startup.some((s) => s.state !== "done"));
  return (
    <div class="view">
      <Verdict status={status} nodeNow={nodeNow} gone={dashboard.link.kind === "gone"} />
      {starting && status.startup.length > 0 && <Startup stages={status.startup} />}
      <div class="home-row">
        <Card title="How surprised the model is by text" aside={<a href="#/talk">Talk to it</a>}>
          <LossCurve curve={dashboard.curve} unigramEntropy={training.unigram_entropy} roles={status.model?.roles ?? []} isBrief />
        </Card>
        <Card title="What happened">
          <Feed events={status.feed} since={status.started_at} />
        </Card>
      </div>
      <div class="grid">
        <OwnWork status={status} />
        <Company status={status} />
        <Limits status={status} />
      </div>
    </div>
  );
}

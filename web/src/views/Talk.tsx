// Talk to the model in training, and read how it wrote before.

import type { NodeStatus } from "../api/status";
import type { NodeActions } from "../api/actions";
import { Chat } from "../components/Chat";
import { ModelTokens } from "../components/ModelTokens";
import { Progress } from "../components/Progress";

interface Props {
  status: NodeStatus;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
}

export function Talk({ status, nodeNow, reachable, actions }: Props) {
  const ready = status.model !== null && status.state !== "starting" && reachable;
  return (
    <div class="view">
      <h1 class="view-title">Talk</h1>
      <Chat steps={status.training.steps} ready={ready} actions={actions} />
      <Progress steps={status.training.steps} nodeNow={nodeNow} reachable={reachable} actions={actions} />
      <ModelTokens reachable={reachable} actions={actions} />
    </div>
  );
}

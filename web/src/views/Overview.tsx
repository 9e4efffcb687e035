// The first view: the verdict, the curve, and what this computer does, in that order.

import type { NodeStatus } from "../api/status";
import { CheckpointCard, ComputerCard, RoundCard, ShardCard } from "../components/cards";
import { OwnerPolicyCard } from "../components/OwnerPolicyCard";
import { Card, Stat } from "../components/parts";
import { Startup } from "../components/Startup";
import { SwarmLine } from "../components/SwarmLine";
import { Verdict } from "../components/Verdict";
import { LossCurve } from "../curve/LossCurve";
import { bigCount, count, loss } from "../format";
import type { Dashboard } from "../state/store";

interface Props {
  dashboard: Dashboard;
  status: NodeStatus;
  nodeNow: number;
}

export function Overview({ dashboard, status, nodeNow }: Props) {
  const { training } = status;
  const starting = status.state === "starting" || (training.steps === 0 && status.startup.some((s) => s.state !== "done"));
  return (
    <div class="view">
      <Verdict status={status} nodeNow={nodeNow} gone={dashboard.link.kind === "gone"} />
      <SwarmLine status={status} />
      {starting && status.startup.length > 0 && <Startup stages={status.startup} />}
      <Card title="How well the model predicts text" hint="Loss measures its surprise at each next piece of text." wide>
        <LossCurve curve={dashboard.curve} unigramEntropy={training.unigram_entropy} roles={status.model?.roles ?? []} />
      </Card>
      <dl class="stats">
        <Stat label="Tokens read" value={bigCount(training.tokens)} note="pieces of words" />
        <Stat label="Tokens per second" value={count(training.tokens_per_second)} note={speedNote(status)} />
        <Stat label="Learning steps" value={count(training.steps)} note={skippedNote(training.skipped_steps)} />
        <Stat label="Loss now" value={loss(training.loss_ema ?? training.loss)} note="lower is better" />
      </dl>
      <p class="onward">
        <a href="#contribution">What you gave over day, week and all time</a>
        <a href="#chat">Talk to the model</a>
      </p>
      <div class="grid grid-two">
        <ComputerCard status={status} />
        <ShardCard data={status.data} />
        <RoundCard status={status} nodeNow={nodeNow} />
        <CheckpointCard status={status} nodeNow={nodeNow} />
        <OwnerPolicyCard policy={status.owner_policy} />
      </div>
    </div>
  );
}

function speedNote(status: NodeStatus): string {
  const seconds = status.training.step_seconds ?? 0;
  if (status.state === "paused") return "resting";
  return seconds > 0 ? `${seconds.toFixed(seconds < 1 ? 2 : 1)} s a step, ${status.training.precision}` : "not measured yet";
}

function skippedNote(skipped: number): string {
  return skipped === 0 ? "none skipped" : `${count(skipped)} skipped: not a number`;
}

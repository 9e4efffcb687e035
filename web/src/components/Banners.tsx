// Everything that deserves attention before any number: most urgent first.

import type { DownloadStatus, NodeStatus } from "../api/status";
import { ago, count, duration } from "../format";
import { isPausedByRule } from "../state/ownerPolicy";
import type { Dashboard } from "../state/store";
import { waitingSentence } from "../words/verdict";
import { Banner } from "./parts";

interface Props {
  dashboard: Dashboard;
  now: number;
  tellsStages: boolean; // false where the view itself says which layers are missing
}

export function Banners({ dashboard, now, tellsStages }: Props) {
  const { status, link } = dashboard;
  const nodeNow = now + dashboard.clockOffset;
  const isTold = status?.state === "waiting_for_stages" && !tellsStages;
  return (
    <div class="banners">
      {link.kind === "gone" && <Gone dashboard={dashboard} now={now} />}
      {status && link.kind !== "gone" && !isTold && <StateBanner status={status} nodeNow={nodeNow} />}
      {status?.checkpoints.alarm && (
        <Banner tone="bad" title="Checkpoints need attention." live>
          {status.checkpoints.alarm}
        </Banner>
      )}
      {status?.warnings.map((warning) => (
        <Banner key={warning} tone="warn" title="Please note:">
          {warning}
        </Banner>
      ))}
      {status?.data && status.data.total_shards > 0 && !status.data.verified && !status.is_demo && (
        <Banner tone="warn" title="Unverified data.">
          {status.data.explanation || "The training text carries no signature, so nobody vouches for it."}
        </Banner>
      )}
    </div>
  );
}

function Gone({ dashboard, now }: { dashboard: Dashboard; now: number }) {
  const { link, stopRequested, status } = dashboard;
  if (link.kind !== "gone") return null;
  const age = status ? ` The values below are from ${ago(dashboard.receivedAt, now)}.` : "";
  if (stopRequested) {
    return (
      <Banner tone="busy" title="The node has stopped." live>
        Its work is saved. Start it again the way you started it before; this page then continues by itself.{age}
      </Banner>
    );
  }
  return (
    <Banner tone="bad" title="The node is gone: it does not answer any more." live>
      Was it stopped, or is this computer asleep? Start it again and this page continues by itself.
      <span class="muted">
        {age} Next try in {duration(link.nextTry - now)}.
      </span>
    </Banner>
  );
}

function StateBanner({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  if (status.state === "waiting_for_data") return <WaitingForData status={status} nodeNow={nodeNow} />;
  if (status.state === "waiting_for_stages") return <WaitingForStages status={status} />;
  if (status.state === "paused" && isPausedByRule(status.owner_policy)) {
    return (
      <Banner tone="warn" title="A rule of yours holds." action={<a href="#settings">The rules</a>}>
        {status.owner_policy.decision.reason} Training resumes by itself; finished steps are kept.
      </Banner>
    );
  }
  if (status.state === "paused") {
    const until = status.paused_until == null ? "until you press Resume" : `for another ${duration(status.paused_until - nodeNow)}`;
    return (
      <Banner tone="warn" title="Paused.">
        Training rests {until}. A pause of more than ten seconds repeats at most one unfinished step.
      </Banner>
    );
  }
  if (status.state === "failed") {
    return (
      <Banner tone="bad" title="Training stopped." live>
        {status.state_reason} {status.verification.action}
      </Banner>
    );
  }
  return null;
}

function WaitingForStages({ status }: { status: NodeStatus }) {
  return (
    <Banner tone="warn" title="Waiting for other computers." live action={<a href="#pipeline">The stages</a>}>
      {waitingSentence(status)}
    </Banner>
  );
}

function WaitingForData({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  const waiting = status.data?.downloads.find((item) => item.retry_at !== null || item.error !== null);
  return (
    <Banner tone="warn" title="Waiting for training text.">
      {waiting ? retryWords(waiting, nodeNow) : status.state_reason}
    </Banner>
  );
}

function retryWords(download: DownloadStatus, nodeNow: number): string {
  const why = download.error ? `${download.name}: ${download.error.replace(/\.$/, "")}. ` : `${download.name} is on its way. `;
  if (download.retry_at === null) return why;
  const left = download.retry_at - nodeNow;
  return `${why}Try ${count(download.attempt + 1)} ${left > 0.5 ? `in ${duration(left)}` : "is under way"}; it resumes by itself.`;
}

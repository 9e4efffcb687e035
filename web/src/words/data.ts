// The training data in plain words. Pure: values in, words out.

import type { DataCoverage, DataStatus, RefreshStatus, ShardStatus } from "../api/status";
import { count, percent, plural } from "../format";
import type { Tone } from "./verdict";

export const USES: Record<ShardStatus["use"], string> = {
  in_use: "being read",
  next: "next",
  assigned: "later",
  held_out: "for tests",
  read: "read before",
};

const ORIGINS: Record<NonNullable<ShardStatus["origin"]>, string> = {
  source: "the source",
  node: "another computer",
  earlier: "an earlier start",
};

const REFRESHED: Record<RefreshStatus["state"], readonly [string, Tone]> = {
  pending: ["not looked at yet", "busy"],
  current: ["up to date", "good"],
  grown: ["newer data there", "good"],
  older: ["behind", "warn"],
  incomplete: ["half published", "warn"],
  refused: ["not to be trusted", "bad"],
  unreachable: ["not reachable", "warn"],
};

export function refreshWords(refresh: RefreshStatus): readonly [string, Tone] {
  return REFRESHED[refresh.state];
}

/** Whether the owner should read what the last look at the source has shown. */
export function needsBanner(refresh: RefreshStatus): boolean {
  return ["older", "incomplete", "refused", "unreachable"].includes(refresh.state);
}

export function originWords(shard: ShardStatus): string {
  if (shard.bytes === null) return "–";
  return shard.origin ? ORIGINS[shard.origin] : "not read yet";
}

export function checkedWords(shard: ShardStatus, data: DataStatus): string {
  if (shard.bytes === null) return "–";
  if (shard.verified) return "yes";
  return data.verified ? "when it is read" : "no digest to check";
}

/** How many copies a stretch of the data set has: 0 none, 1 in part, 2 one, 3 several. */
export function copyLevel(copies: number): 0 | 1 | 2 | 3 {
  if (copies <= 0) return 0;
  if (copies < 1) return 1;
  return copies < 2 ? 2 : 3;
}

export function coverageSentence(coverage: DataCoverage, data: DataStatus): string {
  if (coverage.nodes === 0) return "No computer of this run has reported its shards yet.";
  const share = percent(coverage.shards / Math.max(data.total_shards, 1));
  const have = coverage.nodes === 1 ? "1 computer has" : `${count(coverage.nodes)} computers have`;
  return `${have} ${count(coverage.shards)} of ${plural(data.total_shards, "shard")} (${share}) and can give them to others.`;
}

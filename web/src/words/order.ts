// Which peers a list shows and in what order. Pure, and steady: equal peers never change places.

import type { PeerStatus } from "../api/status";
import { connectionWords, peerState, ratingWords } from "./swarm";

export const ORDERS = {
  active: "Most active",
  speed: "Fastest",
  loss: "Lowest loss",
  steps: "Most steps",
  near: "Nearest",
  traffic: "Most traffic",
  longest: "Longest here",
  newest: "Newest",
  rating: "Lowest rating",
} as const;

export type Order = keyof typeof ORDERS;

type Key = (peer: PeerStatus) => number;

/** The column that shows what an order goes by, and its direction for screen readers. */
export const SORTED_COLUMN: Record<Order, readonly [string, "ascending" | "descending"]> = {
  active: ["Doing", "descending"],
  speed: ["Tokens/s", "descending"],
  loss: ["Loss", "ascending"],
  steps: ["Steps", "descending"],
  near: ["Connection", "ascending"],
  traffic: ["Traffic", "descending"],
  longest: ["Since", "ascending"],
  newest: ["Since", "descending"],
  rating: ["Rating", "ascending"],
};

const ACTIVITY = ["training", "starting", "waiting_for_data", "waiting_for_stages", "paused", "not_training", "stopping", "failed"];
const LAST = Number.POSITIVE_INFINITY;

/** Smallest first. */
const KEYS: Record<Order, readonly Key[]> = {
  active: [activity, (peer) => -aboutSpeed(peer), connected, since],
  speed: [(peer) => -(peer.tokens_per_second ?? 0)],
  loss: [(peer) => peer.loss_ema ?? LAST],
  steps: [(peer) => -peer.steps],
  near: [(peer) => peer.rtt_seconds ?? LAST, connected],
  traffic: [(peer) => -(peer.bytes_sent + peer.bytes_received)],
  longest: [since],
  newest: [(peer) => -(peer.first_seen ?? 0)],
  rating: [(peer) => peer.score ?? 0],
};

export function inOrder(peers: readonly PeerStatus[], order: Order): PeerStatus[] {
  const keys = KEYS[order];
  const rows = peers.map((peer) => ({ peer, values: keys.map((key) => key(peer)) }));
  rows.sort((a, b) => compared(a.values, b.values) || (a.peer.node_id < b.peer.node_id ? -1 : 1)); // ids are unique
  return rows.map((row) => row.peer);
}

/** Peers with every word of the search somewhere in what the list shows of them. */
export function found(peers: readonly PeerStatus[], search: string): readonly PeerStatus[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return peers;
  return peers.filter((peer) => {
    const text = shownText(peer);
    return words.every((word) => text.includes(word));
  });
}

function shownText(peer: PeerStatus): string {
  const parts = [peer.node_id, peer.wallet_id, peer.address, peer.version, peerState(peer.state)[0], ...peer.roles];
  return [...parts, connectionWords(peer.connection), ratingWords(peer.rating)[0]].join(" ").toLowerCase();
}

function compared(a: readonly number[], b: readonly number[]): number {
  for (let index = 0; index < a.length; index++) {
    if (a[index]! !== b[index]!) return a[index]! < b[index]! ? -1 : 1;
  }
  return 0;
}

/** Speed in steps of a tenth, so that peers of about one speed stay where they are. */
function aboutSpeed(peer: PeerStatus): number {
  return Math.round(Math.log(Math.max(peer.tokens_per_second ?? 0, 1)) / Math.log(1.1));
}

function activity(peer: PeerStatus): number {
  const place = ACTIVITY.indexOf(peer.state);
  return place < 0 ? ACTIVITY.length : place;
}

function connected(peer: PeerStatus): number {
  return peer.connection === null ? 1 : 0;
}

function since(peer: PeerStatus): number {
  return peer.first_seen ?? LAST;
}

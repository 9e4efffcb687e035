// The network in plain sentences. Pure: values in, words out.

import type { ConnectionKind, NetworkState, NodeState, NodeStatus, PeerRating, PeerStatus } from "../api/status";
import { bigCount, bytes, count, loss, plural } from "../format";
import type { Said } from "./figures";
import { figure, say } from "./figures";
import type { Tone } from "./verdict";
import { STATE_NAMES, stateTone } from "./verdict";

/** One sentence on who trains this run now and how fast. */
export function swarmSentence(status: NodeStatus, peers: readonly PeerStatus[]): string {
  const { network } = status;
  if (status.peer_count > 0) return companySentence(status, peers);
  switch (network.state) {
    case "off":
      return "The network is off: this computer works on its own.";
    case "starting":
      return "Looking for other computers…";
    case "failed":
      return "The network does not work right now. Training on this computer is not affected.";
    default:
      return "Nobody else is in this run yet.";
  }
}

function companySentence(status: NodeStatus, peers: readonly PeerStatus[]): string {
  const all = status.peer_count;
  const weTrain = status.state === "training";
  const active = Math.min(all, activeOthers(status, peers));
  const speed = `${bigCount(together(status))} tokens per second`;
  if (weTrain && active > 0) return `You and ${plural(active, "other")} train this run; together ${speed}.`;
  if (weTrain) return `You train this run; ${plural(all, "other")} ${all === 1 ? "is" : "are"} there without training now.`;
  if (active > 0) return `${plural(active, "other")} ${active === 1 ? "trains" : "train"} this run, ${speed}; this computer does not train now.`;
  return `${plural(all + 1, "node")} are in this run; none of them trains now.`;
}

function activeOthers(status: NodeStatus, peers: readonly PeerStatus[]): number {
  if (!status.swarm) return peers.filter((peer) => peer.state === "training").length;
  return Math.max(0, status.swarm.training_nodes - (status.state === "training" ? 1 : 0));
}

/** Tokens per second of the run; before the first look at the network those of this computer. */
export function together(status: NodeStatus): number {
  return (status.swarm ?? status.training).tokens_per_second ?? 0;
}

/** For Home: who else is there, in one line. */
export function swarmLine(status: NodeStatus): Said {
  const { network, swarm } = status;
  if (status.peer_count === 0) {
    if (network.state === "off") return ["The network is off."];
    return [network.state === "failed" ? "The network does not work right now." : "Nobody else is in this run yet."];
  }
  if (!swarm) return say`${figure("peer_count", status.peer_count, count)} others are here.`;
  return say`${figure("swarm.training_nodes", swarm.training_nodes, count)} of ${figure("swarm.nodes", swarm.nodes, count)} computers train now.`;
}

/** How the own loss compares with the network's. */
export function comparison(own: number | null, all: number | null | undefined): string {
  if (own === null || all == null) return `yours ${loss(own)}`;
  const difference = own - all;
  if (Math.abs(difference) < 0.0005) return `yours ${loss(own)}, the same`;
  return `yours ${loss(own)}: ${loss(Math.abs(difference))} ${difference > 0 ? "higher" : "lower"}`;
}

export function networkTone(state: NetworkState): Tone {
  if (state === "connected") return "good";
  return state === "failed" || state === "off" ? "warn" : "busy";
}

const CONNECTIONS: Record<ConnectionKind, string> = {
  direct: "Direct",
  punched: "Punched",
  relayed: "Relayed",
  in_memory: "In memory",
};

export function connectionWords(kind: ConnectionKind | null): string {
  return kind === null ? "Through others" : CONNECTIONS[kind];
}

const RATINGS: Record<PeerRating, readonly [string, Tone | null]> = {
  good: ["Good", null],
  neutral: ["Neutral", null],
  doubtful: ["Doubtful", "warn"],
  bad: ["Bad", "bad"],
  banned: ["Banned", "bad"],
};

export function ratingWords(rating: PeerRating): readonly [string, Tone | null] {
  return RATINGS[rating];
}

/** A peer's state as it reports it; peers may report anything, known or not. */
export function peerState(state: string): readonly [string, Tone] {
  if (!Object.hasOwn(STATE_NAMES, state)) return ["No report yet", "busy"];
  const known = state as NodeState;
  return [STATE_NAMES[known], stateTone(known)];
}

/** "expired_claim" -> "Expired claim". */
export function reasonWords(reason: string): string {
  const words = reason.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** A sentence about the organiser's check from outside; "" without one. */
export function outsideWords(reachable: boolean | null): string {
  if (reachable === null) return "";
  return reachable
    ? "The organiser of the run reached this computer from outside."
    : "The organiser of the run did not reach this computer from outside. It takes part through a relay, which is slower. Let the router forward the port of this node.";
}

export function rate(bytesPerSecond: number | null): string {
  return `${bytes(bytesPerSecond ?? 0)}/s`;
}

/** Whether a join line has a place for an invitation, which the page for friends makes. */
export function needsInvitation(joinLine: string): boolean {
  return joinLine.includes(" --invite ");
}

/** Whether a join line says --genesis and a folder, which is on this computer only. */
export function namesFolder(joinLine: string): boolean {
  const place = / --genesis (.+)$/.exec(joinLine)?.[1] ?? "";
  return place !== "" && !place.includes("://");
}

/** Whether no other computer can reach these addresses. */
export function onlyHere(addresses: readonly string[]): boolean {
  return addresses.length > 0 && addresses.every((address) => /^\/(ip4\/127\.|ip6\/::1\/)/.test(address));
}

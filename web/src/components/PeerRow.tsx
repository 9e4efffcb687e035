// One node of the run in the list: who, doing what, how fast, how reached, since when. On a phone each row is a card.

import type { NodeStatus, PeerStatus } from "../api/status";
import type { ComponentChildren } from "preact";
import { ago, bigCount, bytes, count, duration, loss, runningFor, shortId } from "../format";
import { layerWords, shortRoleWords } from "../words/part";
import { connectionWords, peerState, ratingWords } from "../words/swarm";
import type { Tone } from "../words/verdict";

function Cell(props: { label: string; children: ComponentChildren; note?: ComponentChildren }) {
  return (
    <td data-label={props.label}>
      <div>{props.children}</div>
      {props.note && <div class="muted small">{props.note}</div>}
    </td>
  );
}

export function OwnRow({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  const { training, model, data, network } = status;
  return (
    <tr class="own-row">
      <th scope="row">
        This computer
        <div class="muted small mono" title={status.node_id ?? undefined}>
          {shortId(status.node_id)}
        </div>
      </th>
      <Doing state={status.state} roles={model?.roles ?? []} layers={model?.layers ?? null} shard={data?.shard ?? null} />
      <Cell label="Tokens/s">{count(training.tokens_per_second)}</Cell>
      <Cell label="Loss">{loss(training.loss_ema)}</Cell>
      <Cell label="Steps" note={`${bigCount(training.tokens)} tokens`}>
        {count(training.steps)}
      </Cell>
      <Cell label="Connection">–</Cell>
      <Traffic sent={network.bytes_sent} received={network.bytes_received} />
      <Cell label="Since">{runningFor(status, nodeNow)}</Cell>
      <Cell label="Rating">–</Cell>
    </tr>
  );
}

export function PeerRow({ peer, nodeNow }: { peer: PeerStatus; nodeNow: number }) {
  const [rating, tone] = ratingWords(peer.rating);
  const since = peer.first_seen ?? peer.started_at;
  const delay = peer.rtt_seconds === null ? "" : `, ${(peer.rtt_seconds * 1000).toFixed(0)} ms`;
  return (
    <tr>
      <th scope="row">
        <span class="mono" title={peer.node_id}>
          {shortId(peer.node_id)}
        </span>
        <div class="muted small">
          wallet <span class="mono">{peer.wallet_id.slice(0, 8)}</span>
        </div>
      </th>
      <Doing state={peer.state} roles={peer.roles} layers={peer.layers} shard={peer.shard} />
      <Cell label="Tokens/s">{count(peer.tokens_per_second)}</Cell>
      <Cell label="Loss">{loss(peer.loss_ema)}</Cell>
      <Cell label="Steps" note={`${bigCount(peer.tokens)} tokens`}>
        {count(peer.steps)}
      </Cell>
      <Cell label="Connection" note={peer.address && <span class="mono">{shortAddress(peer.address)}</span>}>
        {connectionWords(peer.connection)}
        {delay}
      </Cell>
      <Traffic sent={peer.bytes_sent} received={peer.bytes_received} />
      <Cell label="Since" note={`seen ${ago(peer.last_seen, nodeNow)}`}>
        {since === null ? "–" : duration(nodeNow - since)}
      </Cell>
      <Cell label="Rating">{tone ? <span class={`pill tone-${tone}`}>{rating}</span> : rating}</Cell>
    </tr>
  );
}

interface DoingProps {
  state: string;
  roles: readonly string[];
  layers: { start: number; stop: number } | null;
  shard: number | null;
}

function Doing({ state, roles, layers, shard }: DoingProps) {
  const [words, tone]: readonly [string, Tone] = peerState(state);
  const held = roles.length > 0 && layerWords(roles, layers);
  const part = [shortRoleWords(roles, layers, " and "), held, shard === null ? "" : `shard ${count(shard)}`].filter(Boolean);
  return (
    <Cell label="Doing" note={part.join(", ")}>
      <span class={`state tone-${tone}`}>
        <i class="dot" aria-hidden="true" /> {words}
      </span>
    </Cell>
  );
}

function Traffic({ sent, received }: { sent: number; received: number }) {
  return (
    <Cell label="Traffic">
      <Arrow up /> {bytes(sent)}
      <br />
      <Arrow up={false} /> {bytes(received)}
    </Cell>
  );
}

export function Arrow({ up }: { up: boolean }) {
  return (
    <>
      <span aria-hidden="true">{up ? "↑" : "↓"}</span>
      <span class="hidden-visually">{up ? "sent" : "received"}</span>
    </>
  );
}

/** "/ip4/203.0.113.9/tcp/4001/p2p/12D3..." -> "203.0.113.9:4001"; whatever else it is stays as it is. */
function shortAddress(address: string): string {
  const match = /^\/(ip4|ip6|dns4?|dns6)\/([^/]+)\/tcp\/(\d+)/.exec(address);
  if (!match) return address.length > 40 ? `${address.slice(0, 38)}…` : address;
  return match[1] === "ip6" ? `[${match[2]}]:${match[3]}` : `${match[2]}:${match[3]}`;
}

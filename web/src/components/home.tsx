// The cards of Home: this computer's contribution, the other computers, and the limits of training.

import type { NodeStatus } from "../api/status";
import type { ComponentChildren } from "preact";
import { bigCount, count, duration, nounOf, percent } from "../format";
import { figure, say } from "../words/figures";
import { peerState, swarmLine } from "../words/swarm";
import { Figure, Sentence } from "./Figure";
import { Card, Facts } from "./parts";

const PEERS_SHOWN = 4;

type Number = number | null | undefined;

function Fact(path: string, value: Number, words: (value: Number) => string): ComponentChildren {
  return <Figure of={figure(path, value, words)} />;
}

export function OwnWork({ status }: { status: NodeStatus }) {
  const { accepted, contribution } = status;
  const isAlone = accepted.rounds + accepted.refused === 0;
  return (
    <Card title="Your contribution" aside={<a href="#/contribution">History</a>}>
      <Facts
        rows={[
          ["Tokens read", Fact("contribution.tokens", contribution?.tokens, bigCount)],
          ["Time training", Fact("contribution.training_seconds", contribution?.training_seconds, duration)],
          isAlone ? null : ["Accepted", <Sentence said={say`${figure("accepted.tokens", accepted.tokens, bigCount)} tokens`} />],
          isAlone ? null : ["Share of all", Fact("accepted.share", accepted.share, percent)],
        ]}
      />
      <p class="muted small">{isAlone ? "Once others train with you, they check and count your work." : "Certified by the others in this run."}</p>
    </Card>
  );
}

export function Company({ status }: { status: NodeStatus }) {
  const shown = status.peers.slice(0, PEERS_SHOWN);
  return (
    <Card title="Other computers" aside={<a href="#/network">All</a>}>
      <p>
        <Sentence said={swarmLine(status)} />
      </p>
      {shown.length > 0 && (
        <Facts
          rows={shown.map((peer, at) => [
            peer.node_id.slice(-6),
            peer.state === "training" ? (
              <Sentence said={say`${figure(`peers.${at}.tokens_per_second`, peer.tokens_per_second, count)} tokens/s`} />
            ) : (
              peerState(peer.state)[0]
            ),
          ])}
        />
      )}
      <p>
        <a class="button button-primary" href="#/invite">
          Invite a computer
        </a>
      </p>
    </Card>
  );
}

export function Limits({ status }: { status: NodeStatus }) {
  const { memory, network, resources, owner_policy: policy } = status;
  return (
    <Card title="Your limits" aside={<a href="#/settings">Change</a>}>
      <p>{policy.decision.reason}</p>
      <Facts
        rows={[
          memory && ["Memory", <Of used={["memory.resident_mb", memory.resident_mb]} most={["memory.limit_mb", memory.limit_mb]} unit="MB" />],
          resources.cpu_threads_limit > 0
            ? [
                "Processor",
                <Of
                  used={["resources.cpu_cores", resources.cpu_cores]}
                  most={["resources.cpu_threads_limit", resources.cpu_threads_limit]}
                  unit={nounOf(resources.cpu_threads_limit, "core")}
                  digits={1}
                />,
              ]
            : null,
          ["Upload", network.upload_limit === null ? "no limit" : <Sentence said={say`${figure("network.upload_limit", network.upload_limit, bitRate)}`} />],
        ]}
      />
    </Card>
  );
}

function Of(props: { used: readonly [string, Number]; most: readonly [string, Number]; unit: string; digits?: number }) {
  const words = (value: Number) => (props.digits && value != null ? value.toFixed(props.digits) : count(value));
  return <Sentence said={say`${figure(...props.used, words)} of ${figure(...props.most, count)} ${props.unit}`} />;
}

/** Bytes per second, as the setting has it: "20 Mbit/s". */
function bitRate(bytesPerSecond: Number): string {
  return bytesPerSecond == null ? "–" : `${Number(((bytesPerSecond * 8) / 1e6).toPrecision(3))} Mbit/s`;
}

// The network's training: the five headline values, the curve, the proof that it learns, and who takes part.

import type { NodeStatus, PeerStatus } from "../api/status";
import { useMemo } from "preact/hooks";
import { RoundCard } from "../components/cards";
import { Card, Facts, Section, Stat } from "../components/parts";
import { LossCurve } from "../curve/LossCurve";
import { ago, bigCount, count, loss, shortId } from "../format";
import type { Dashboard } from "../state/store";
import { inOrder } from "../words/order";
import { layerWords, shortRoleWords } from "../words/part";
import type { Tone } from "../words/verdict";

const NODES_SHOWN = 10;

interface Props {
  dashboard: Dashboard;
  status: NodeStatus;
  nodeNow: number;
}

const CONVERGENCE: Record<NodeStatus["verification"]["status"], readonly [string, Tone]> = {
  verified: ["Verified", "good"],
  improving: ["Improving", "good"],
  insufficient_data: ["Too early to tell", "busy"],
  stalled: ["Stalled", "warn"],
  diverged: ["Diverged", "bad"],
  not_training: ["Not training", "warn"],
};

export function Training({ dashboard, status, nodeNow }: Props) {
  const { swarm, training, data } = status;
  const least = swarm?.min_loss ?? null;
  const [convergence, tone] = CONVERGENCE[status.verification.status];
  return (
    <Section title="Training">
      <dl class="stats stats-five">
        <Stat
          label="Training nodes"
          value={count(swarm?.training_nodes ?? Number(status.state === "training"))}
          note={`of ${count(swarm?.nodes ?? status.peer_count + 1)} in the run`}
        />
        <Stat label="Global loss" value={loss(swarm?.global_loss ?? training.loss_ema)} note={least === null ? "smoothed, over all of them" : `smoothed; lowest so far ${loss(least)}`} />
        <Stat label="Total steps" value={count(swarm?.total_steps ?? training.steps)} note={`${bigCount(swarm?.total_tokens ?? training.tokens)} tokens`} />
        <Stat label="Data shards" value={count(data?.total_shards ?? 0)} note={`${count(swarm?.shards_covered ?? data?.shards_seen ?? 0)} read so far`} />
        <Stat label="Model convergence" value={convergence} tone={tone} note="on text never trained on" />
      </dl>
      <Card title="Loss" wide>
        <LossCurve curve={dashboard.curve} unigramEntropy={training.unigram_entropy} roles={status.model?.roles ?? []} />
      </Card>
      <div class="grid">
        <Proof status={status} />
        <RoundCard status={status} nodeNow={nodeNow} />
        <ModelCard status={status} />
      </div>
      <Nodes status={status} peers={dashboard.peers} nodeNow={nodeNow} />
    </Section>
  );
}

function Proof({ status }: { status: NodeStatus }) {
  const { held_out: held, held_out_sequences: sequences } = status.training;
  const last = held[held.length - 1];
  const improvement = last?.improvement ?? null;
  return (
    <Card title="Does it really learn?" hint="Tested on the same held-out sequences again and again.">
      <p>{status.verification.reason}</p>
      <p class="muted">{status.verification.action}</p>
      <Facts
        rows={[
          ["Held-out sequences", count(sequences)],
          ["Tests so far", count(held.length)],
          improvement === null || held.length < 2 ? null : ["Improvement", `${improvement.toFixed(3)} ± ${last?.standard_error?.toFixed(3) ?? "?"} nats per token`],
          last?.measured_by.length ? ["Measured and signed by", last.measured_by.map(shortId).join(", ")] : null,
          ["Loss trend", status.verification.loss_trend.replaceAll("_", " ")],
        ]}
      />
    </Card>
  );
}

function ModelCard({ status }: { status: NodeStatus }) {
  const { model, training, run } = status;
  if (!model) return null;
  const shape = model.architecture;
  return (
    <Card title="Model">
      <Facts
        rows={[
          ["Parameters", bigCount(model.parameter_count)],
          ["Shape", `${shape.layer_count} layers, width ${count(shape.hidden_size)}, ${shape.head_count} heads`],
          ["Vocabulary", `${count(shape.vocabulary_size)} tokens`],
          ["Context", `${count(shape.sequence_length)} tokens`],
          ["Batch", `${count(training.sequences_per_step)} sequences per step`],
          training.lr === null ? null : ["Learning rate", training.lr.toExponential(2)],
          run ? ["Run", <span class="mono">{shortId(run.run_id)}</span>] : null,
        ]}
      />
      {run && <p class="muted small">{run.explanation}</p>}
    </Card>
  );
}

function Nodes({ status, peers, nodeNow }: { status: NodeStatus; peers: readonly PeerStatus[]; nodeNow: number }) {
  const { model, training } = status;
  const shown = useMemo(() => inOrder(peers, "active").slice(0, NODES_SHOWN), [peers]);
  return (
    <Card title="Nodes" wide>
      <div class="scroll" tabIndex={0} role="region" aria-label="List of nodes">
        <table>
          <thead>
            <tr>
              <th scope="col">Node</th>
              <th scope="col">Role</th>
              <th scope="col">Layers</th>
              <th scope="col">Loss</th>
              <th scope="col">Tokens/s</th>
              <th scope="col">Seen</th>
            </tr>
          </thead>
          <tbody>
            <tr>
              <th scope="row">This computer</th>
              <td>{model ? shortRoleWords(model.roles, model.layers, ", ") : "–"}</td>
              <td>{model ? layerWords(model.roles, model.layers) : "–"}</td>
              <td>{loss(training.loss_ema)}</td>
              <td>{count(training.tokens_per_second)}</td>
              <td>now</td>
            </tr>
            {shown.map((peer) => (
              <tr key={peer.node_id}>
                <th scope="row" class="mono">
                  {shortId(peer.node_id)}
                </th>
                <td>{shortRoleWords(peer.roles, peer.layers, ", ")}</td>
                <td>{layerWords(peer.roles, peer.layers)}</td>
                <td>{loss(peer.loss_ema)}</td>
                <td>{count(peer.tokens_per_second)}</td>
                <td>{ago(peer.last_seen, nodeNow)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="small">
        <a href="#swarm">{peers.length > shown.length ? `All ${count(peers.length + 1)} nodes` : "Who is there, and where"}</a>
      </p>
    </Card>
  );
}

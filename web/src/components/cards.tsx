// Cards about this computer, its text, its rounds and its safety, shared by several views.

import type { DataStatus, NodeStatus } from "../api/status";
import { ago, bigCount, bytes, count, duration, flopRate, percent, plural, stepsWords } from "../format";
import { layerWords, roleWords } from "../words/part";
import { Bar, Card, Facts } from "./parts";

export function ComputerCard({ status }: { status: NodeStatus }) {
  const { model, memory, resources, acceleration } = status;
  return (
    <Card title="This computer" hint="Its part of the model and what that costs it.">
      <Facts
        rows={[
          ["Role", model ? roleWords(model.roles, model.layers) : "–"],
          ["Holds", model ? holds(model) : "–"],
          ["Memory tier", memory ? `${count(memory.tier_mb)} MB (limit: ${memory.limit_source})` : "–"],
          ["Computes on", resources.device_name || resources.device],
          acceleration?.mfu == null ? null : ["Speed", speedWords(acceleration)],
        ]}
      />
      {memory && (
        <Bar
          label="Memory"
          fraction={memory.resident_mb / Math.max(memory.limit_mb, 1)}
          text={`${count(memory.resident_mb)} of ${count(memory.limit_mb)} MB`}
        />
      )}
      {resources.cpu_threads_limit > 0 && resources.cpu_cores !== null && (
        <Bar
          label="Processor"
          fraction={resources.cpu_cores / resources.cpu_threads_limit}
          text={`${resources.cpu_cores.toFixed(1)} of ${plural(resources.cpu_threads_limit, "core")}`}
        />
      )}
      {resources.gpu_memory_bytes !== null && resources.gpu_memory_total_bytes !== null && (
        <Bar
          label="Graphics memory"
          fraction={resources.gpu_memory_bytes / Math.max(resources.gpu_memory_total_bytes, 1)}
          text={`${bytes(resources.gpu_memory_bytes)} of ${bytes(resources.gpu_memory_total_bytes)}`}
        />
      )}
      {resources.gpu_utilisation !== null && <Bar label="Graphics processor" fraction={resources.gpu_utilisation} />}
      {(resources.disk_used_bytes > 0 || resources.disk_free_bytes > 0) && (
        <p class="muted small">
          {bytes(resources.disk_used_bytes)} on disk, {bytes(resources.disk_free_bytes)} free
        </p>
      )}
    </Card>
  );
}

function speedWords({ flops_per_second: flops, mfu, peak_source }: NonNullable<NodeStatus["acceleration"]>): string {
  return `${flopRate(flops)}, ${percent(mfu ?? 0)} of the peak ${peak_source === "table" ? "in its data sheet" : "measured here"} (MFU)`;
}

function holds({ layers, roles, architecture, parameter_count }: NonNullable<NodeStatus["model"]>): string {
  if (roles.length === 0) return "nothing yet";
  const part = layerWords(roles, layers) + (layers ? ` of ${count(architecture.layer_count)}` : "");
  return `${part}; the model has ${bigCount(parameter_count)} parameters`;
}

export function verifiedWords(data: DataStatus): string {
  if (data.is_demo) return "made on this computer";
  return data.verified ? "yes, signed and checked" : "no: nobody vouches for it";
}

export function ShardCard({ data }: { data: DataStatus | null }) {
  if (!data) {
    return (
      <Card title="Training text" hint="Which part of the text it reads now.">
        <p class="muted">The text is still being prepared.</p>
      </Card>
    );
  }
  if (!data.source || data.total_shards === 0) {
    return (
      <Card title="Training text">
        <p>{data.explanation}</p>
      </Card>
    );
  }
  const fraction = data.shard_windows_total > 0 ? data.shard_windows_done / data.shard_windows_total : 0;
  return (
    <Card title="Training text" hint="The text is cut into shards; this computer reads its own ones in turn.">
      <Bar
        label={data.shard === null ? "No shard yet" : `Shard ${count(data.shard)}`}
        fraction={fraction}
        text={`${count(data.shard_windows_done)} of ${count(data.shard_windows_total)} sequences`}
      />
      <Facts
        rows={[
          ["Shards read", `${count(data.shards_seen)} of ${count(data.total_shards - data.held_out_shards)}`],
          ["Kept for testing", `${plural(data.held_out_shards, "shard")}, never trained on`],
          ["Next shard", data.next_shard_ready ? "ready" : "not fetched yet"],
          ["Verified", verifiedWords(data)],
        ]}
      />
    </Card>
  );
}

export function RoundCard({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  const { diloco } = status;
  const total = diloco.inner_steps_total;
  return (
    <Card title="Teamwork" hint="Computers learn alone for many steps, then combine what they learned in an outer step (DiLoCo).">
      {total > 0 && (
        <Bar
          label="Steps until the next outer step"
          fraction={diloco.inner_step / total}
          text={stepsWords(diloco)}
        />
      )}
      <Facts
        rows={[
          ["Outer steps", count(diloco.outer_steps)],
          ["With others, since this start", count(diloco.successful_syncs)],
          ["Last one", ago(diloco.last_sync, nodeNow)],
          diloco.outer_steps > 0 ? ["Computers in it", count(diloco.members)] : null,
        ]}
      />
      <p class="muted small">{diloco.explanation}</p>
    </Card>
  );
}

export function CheckpointCard({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  const { checkpoints } = status;
  return (
    <Card title="Saved work" hint="Training resumes from a checkpoint after a restart or a power cut.">
      <p class="safety">
        A kill now could lose <strong>{checkpoints.could_lose}</strong>.
      </p>
      <Facts
        rows={[
          ["Last saved", checkpoints.last_saved_time === null ? "not yet" : ago(checkpoints.last_saved_time, nodeNow)],
          ["At step", count(checkpoints.last_saved_step)],
          ["Kept on disk", plural(checkpoints.generations.length, "checkpoint")],
          ["Saving takes", duration(checkpoints.last_write_seconds)],
        ]}
      />
      {checkpoints.restored && <p class="muted small">{checkpoints.restored}</p>}
    </Card>
  );
}


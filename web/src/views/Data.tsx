// Where the training text comes from, what is fetched, and how much this computer has read.

import { ShardCard, verifiedWords } from "../components/cards";
import { Bar, Card, Facts } from "../components/parts";
import { bigCount, bytes, count, duration } from "../format";
import type { DataStatus, DownloadStatus, NodeStatus } from "../state/node";

export function Data({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  const { data } = status;
  return (
    <div class="view">
      <h1 class="view-title">Data</h1>
      {data && !data.source ? (
        <ShardCard data={data} />
      ) : data ? (
        <>
          <div class="grid">
            <SourceCard data={data} />
            <ShardCard data={data} />
            <CacheCard data={data} />
          </div>
          <Downloads downloads={data.downloads} nodeNow={nodeNow} />
        </>
      ) : (
        <Card title="Training text">
          <p class="muted">The data source is still being opened.</p>
        </Card>
      )}
    </div>
  );
}

function SourceCard({ data }: { data: DataStatus }) {
  return (
    <Card title="Source">
      <Facts
        rows={[
          ["From", <span class="mono">{data.source}</span>],
          ["Size", `${count(data.total_shards)} shards, ${bigCount(data.total_tokens)} tokens`],
          ["Verified", verifiedWords(data)],
        ]}
      />
      <p class="muted small">{data.explanation}</p>
    </Card>
  );
}

function CacheCard({ data }: { data: DataStatus }) {
  return (
    <Card title="Kept on this computer">
      <Bar
        label="Shard cache"
        fraction={data.cached_bytes / Math.max(data.cache_limit_bytes, 1)}
        text={`${bytes(data.cached_bytes)} of ${bytes(data.cache_limit_bytes)}`}
      />
      <Facts
        rows={[
          ["Shards in the cache", count(data.cached_shards)],
          ["Whole passes", count(data.passes)],
          ["Shard changes", count(data.rotations)],
        ]}
      />
      {data.last_rotation_reason && <p class="muted small">Last change: {data.last_rotation_reason}</p>}
    </Card>
  );
}

function Downloads({ downloads, nodeNow }: { downloads: DownloadStatus[]; nodeNow: number }) {
  return (
    <Card title="Downloads" wide>
      {downloads.length === 0 && <p class="muted">Nothing is being fetched right now.</p>}
      <ul class="downloads">
        {downloads.map((item) => (
          <li key={item.name}>
            <Bar
              label={item.name}
              fraction={item.bytes_total ? item.bytes_done / item.bytes_total : null}
              text={`${bytes(item.bytes_done)}${item.bytes_total ? ` of ${bytes(item.bytes_total)}` : ""}, ${bytes(item.bytes_per_second)}/s`}
            />
            {item.error && (
              <p class="small text-warn">
                {item.error}
                {item.retry_at !== null && ` Next try in ${duration(item.retry_at - nodeNow)}.`}
              </p>
            )}
          </li>
        ))}
      </ul>
    </Card>
  );
}

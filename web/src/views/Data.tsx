// Where the training text comes from, what is fetched, and how much this computer has read.

import type { DataStatus, DownloadStatus, NodeStatus } from "../api/status";
import { ShardCard, verifiedWords } from "../components/cards";
import { Banner, Bar, Card, Facts, Section } from "../components/parts";
import { CoverageCard, ShardList } from "../components/ShardList";
import { ago, bigCount, bytes, count, duration } from "../format";
import { needsBanner, refreshWords } from "../words/data";

export function Data({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  const { data } = status;
  return (
    <Section title="Data">
      {data && !data.source ? (
        <ShardCard data={data} />
      ) : data ? (
        <>
          <RefreshBanner data={data} />
          <div class="grid">
            <SourceCard data={data} nodeNow={nodeNow} />
            <ShardCard data={data} />
            <CacheCard data={data} />
          </div>
          <Downloads downloads={data.downloads} nodeNow={nodeNow} />
          {data.shards.length > 0 && <ShardList data={data} />}
          {data.coverage && data.total_shards > 0 && <CoverageCard coverage={data.coverage} data={data} />}
        </>
      ) : (
        <Card title="Training text">
          <p class="muted">The data source is still being opened.</p>
        </Card>
      )}
    </Section>
  );
}

function RefreshBanner({ data: { refresh } }: { data: DataStatus }) {
  if (!needsBanner(refresh)) return null;
  const [words, tone] = refreshWords(refresh);
  return (
    <Banner tone={tone} title={`The source is ${words}.`}>
      {refresh.explanation}
    </Banner>
  );
}

function SourceCard({ data, nodeNow }: { data: DataStatus; nodeNow: number }) {
  const { refresh } = data;
  const [words, tone] = refreshWords(refresh);
  return (
    <Card title="Source">
      <Facts
        rows={[
          ["From", <span class="mono">{data.source}</span>],
          ["Size", `${count(data.total_shards)} shards, ${bigCount(data.total_tokens)} tokens`],
          ["Verified", verifiedWords(data)],
          ["Last look", refresh.checked_at === null ? "not yet" : ago(refresh.checked_at, nodeNow)],
          ["At the source", <span class={`pill tone-${tone}`}>{words}</span>],
          refresh.newest_shards !== null && refresh.newest_shards > data.total_shards
            ? ["Newest there", `${count(refresh.newest_shards)} shards, ${bigCount(refresh.newest_tokens)} tokens`]
            : null,
        ]}
      />
      <p class="muted small">{data.explanation}</p>
      {refresh.state === "grown" && <p class="small">{refresh.explanation}</p>}
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

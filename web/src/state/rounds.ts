// Certified rounds, in which computers agree on one aggregate; mirrors neuroshard/api/bodies/rounds.py. Times in seconds.

import type { Layers } from "./pipeline";

export type MemberPart = "accepted" | "refused" | "abstained" | "absent" | "unjudged";
export type AbandonReason = "no_answer" | "objection" | "contributions" | "storage";

export interface RoundMember {
  node_id: string;
  wallet_id: string;
  part: MemberPart;
  refusal: string; // class of the reason
  reason: string; // in the node's words
}

export interface RoundPhases {
  gather: number | null;
  exchange: number | null;
  vote: number | null;
}

export interface Round {
  stage: number; // counted from 0
  layers: Layers;
  outer_step: number;
  abandoned_for: AbandonReason | null; // null: it completed
  reason: string;
  is_late: boolean;
  ended_at: number | null;
  seconds: number | null;
  phases: RoundPhases;
  members: RoundMember[];
  bytes_sent: number;
  bytes_received: number;
  strategy: string;
  part: string; // what it was about, in words
  codec: string;
  aggregator: string;
  views: number;
  certificate: { value: string; votes: number; voters: number } | null;
}

export interface Contributor {
  node_id: string;
  wallet_id: string;
  is_here: boolean;
  rounds: number;
  accepted: number;
  refused: number;
  absent: number;
}

export interface Rounds {
  rounds: Round[]; // the newest first
  completed: number;
  abandoned: Partial<Record<AbandonReason, number>>;
  accepted: number;
  refused: Record<string, number>;
  bytes_sent: number;
  bytes_received: number;
  hash_agreement_rate: number | null;
  sync_success_rate: number | null;
  contributors: Contributor[];
}

// The strings of invitations and of the first question, in the wizard and in the dashboard.

import type { InvitationBody, InvitedModelBody, NearbyRunBody, TextFolderBody } from "../api/bodies";
import type { NodeStatus } from "../api/status";
import { bigCount, bytes, count, dateAndTime, plural } from "../format";

export const BEGIN = {
  title: "What would you like to do?",
  about: "NeuroShard trains a language model on your computer, alone or together with others.",
  join: "Join with an invitation",
  joinAbout: "A friend has sent you a link, a file or a QR code.",
  demo: "See it work",
  demoAbout: "A small model learns from text on this computer. It needs no wallet and no network, and nothing is stored about you.",
  text: "Train on my own text",
  textAbout: "Choose a folder. The text and the model stay on this computer.",
  noPublicRun: "There is no public run yet. To train with others, you need an invitation or a run on your network.",
  publicRun: (name: string) => `The public run of this release is called ${name}.`,
};

export const NEARBY = {
  title: (count: number) => (count === 1 ? "A run on your network" : "Runs on your network"),
  none: "None found so far. Start NeuroShard on the computer with the run: it appears here within seconds.",
  about: "The run's owner must allow your computer. You both see the same four words.",
  join: "Join",
  name: (run: NearbyRunBody) => run.name || `Run ${run.run_id.slice(0, 8)}`,
};

export const PASTE = {
  title: "Join with an invitation",
  label: "Invitation",
  hint: "Paste the link or the code. You can also drop the invitation file or a picture of the QR code here.",
  open: "Open a file or picture",
  scan: "Scan a QR code",
  closeCamera: "Close the camera",
  camera: "Camera picture",
  hold: "Hold the QR code in front of the camera so that it fills the picture. The picture stays on this computer.",
  forbidden: "The browser may not use the camera. Allow it next to the address, or open a picture of the QR code.",
  noCamera: "The camera does not work. Close other programs that use it, or open a picture of the QR code.",
  noCode: "There is no readable QR code in this picture. Take it from straight ahead, sharp and in good light.",
  noPicture: "The browser cannot open this picture. Use a PNG or JPEG file of at most 20 MB.",
  show: "Show the invitation",
  tooLong: "The file is too long for an invitation. Open the file that ends in .neuroshard-invitation.",
};

export const SHOWN = {
  title: (name: string) => `Join the run ${name || "of a friend"}?`,
  about: "Nothing has been sent or downloaded yet. Compare the four words with the person who invited you.",
  join: "Join",
  other: "Another invitation",
  safe: "Others in the run never get your wallet or your files. You can leave at any time.",
};

export const OWN_TEXT = {
  title: "Which text?",
  about: "The program reads the text files in this folder and its subfolders. It changes nothing there.",
  label: "Folder",
  hint: "Choose a folder below, or enter its path. It needs at least 100 kB of text. Text, Markdown, HTML and source code are read.",
};

export const FOLDERS = {
  title: "Folders on this computer",
  drives: "Drives",
  up: "↑ Folder above",
  reading: "Reading the folders of this computer…",
  none: "There are no folders in here.",
  more: "Not all folders are shown. You can enter the path of any folder above.",
  count: ({ files, bytes: size, is_complete: isComplete }: TextFolderBody) => {
    if (files === 0) return isComplete ? "no text files" : "not counted";
    return `${isComplete ? "" : "at least "}${plural(files, "text file")}, ${bytes(size)}`;
  },
};

export function factsOf(invitation: InvitationBody): [string, string][] {
  return [
    ["Run", invitation.name || "–"],
    ["Inviter", inviter(invitation)],
    ["Words of the owner's key", invitation.inviter_words],
    ["Model", invitation.model ? modelWords(invitation.model) : "not stated in the invitation"],
    ["This computer", invitation.model ? roomWords(invitation.model) : "known after you join"],
    ["Sends per day", invitation.gb_per_day === null ? "no limit set; you can set one in a moment" : `at most ${gigabytes(invitation.gb_per_day)}`],
    ["Training text", dataWords(invitation)],
    ["Made for", invitation.uses === 1 ? "one wallet" : `${count(invitation.uses)} wallets in all`],
    ["Valid until", dateAndTime(invitation.not_after)],
  ];
}

function inviter(invitation: InvitationBody): string {
  const label = invitation.label || "no label";
  return invitation.is_by_guest ? `${label} (made by a member, not by the owner)` : label;
}

function modelWords(model: InvitedModelBody): string {
  return `${bigCount(model.parameters)} parameters in ${plural(model.stages, "stage")}`;
}

function roomWords(model: InvitedModelBody): string {
  const need = `${count(model.stage_mb)} MB of memory`;
  return model.fits ? `can hold a stage: it needs ${need}` : `cannot hold a stage: it needs ${need}, more than your limit`;
}

function dataWords(invitation: InvitationBody): string {
  return invitation.data.length === 0 ? "sent by the computers of the run" : invitation.data.join(", ");
}

function gigabytes(value: number): string {
  return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} GB`;
}

export function textWords(text: TextFolderBody): string {
  return `${plural(text.files, "file")}, ${bytes(text.bytes)}`;
}

export const INVITE = {
  title: "Invite",
  hint: "An invitation lets one computer, or several, join your run. Anyone with it can join, so send it privately.",
  label: "Name of the invitation",
  uses: "Wallets that can join",
  days: "Days until it ends",
  mayInvite: "May invite others",
  mayInviteAbout: "Their invitations have fewer places and end no later.",
  make: "Make an invitation",
  link: "Link of the invitation",
  once: "Copy the link or save the file now: this computer does not keep it.",
  save: "Save as a file",
  qr: "QR code of the invitation",
  demo: "Nobody can join a demo. Stop it, start NeuroShard again, and choose to join with an invitation or to train on your own text.",
  open: "Anyone may join this run, so it needs no invitation. Give others the command on the page Network.",
  off: "This computer trains without the network, so nobody can join. Turn on Network in the settings, and restart.",
  noRun: "This computer has no run yet that others could join.",
  guest: "Only the owner of the run can invite, and members that were invited to do so.",
  none: "No invitation yet.",
  revoke: "Revoke",
  revoked: "revoked",
  expired: "expired",
};

export const DEPUTY = {
  title: "Name a deputy?",
  about:
    "If this computer is lost, a deputy can let the run continue. A deputy can do nothing else that only you can do. Choose a member that you trust.",
  noMember: "Invite somebody first. When that person has joined, you can name a deputy here.",
  name: "Make deputy",
  is: "deputy",
};

export const KNOCK = {
  title: (name: string) => `${name || "A computer"} asks to join`,
  about: "Compare the four words with those that its owner sees. It is on your local network.",
  allow: "Allow",
  refuse: "Refuse",
};

export const OTHER_RUN = {
  title: "Join another run",
  hint: "The node saves a checkpoint first and keeps this run in the list.",
  known: "Runs of this computer",
  back: "Join again",
  own: "Train a run of my own",
  current: "now",
  leaving: "The node saves a checkpoint and starts again. This page continues by itself.",
};

/** Why this node can make no invitations. */
export function noInvitations({ run, network }: NodeStatus): string {
  if (run?.is_demo) return INVITE.demo;
  if (network.state === "off") return INVITE.off;
  return network.join_line ? INVITE.open : INVITE.noRun;
}

export function placesLeft(left: number, uses: number): string {
  return `${count(left)} of ${plural(uses, "place")} left`;
}

"""QR codes of invitations in the wizard: from a camera, from a picture, and where neither gives one."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from dashboard_session import OpenPage, Visits
from playwright.sync_api import FilePayload, Page, expect
from wizard_session import check_page, heading, press

from benchmarks.node_process import free_port
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import LINK, InvitationTerms, InvitedModel, InvitedPlaces, invite, to_code
from neuroshard.runs.invitation_making import qr_rows, qr_svg
from neuroshard.types import RunId
from tests.worlds.claims import identity_of
from tests.worlds.setup_api import SetupApi
from tests.worlds.system_programs import chromium_path

pytestmark = pytest.mark.browser
OWNER = Wallet.from_secret(TokenSecret("hex", bytes([7] * 32)))
FRAMES = 10


def link() -> str:
    """A link with everything that an invitation may carry: its code has the most squares."""
    peers = tuple(f"/dns/node{n}.example.org/tcp/4001/p2p/{identity_of(n).node_id}" for n in range(1, 4))
    places = InvitedPlaces("friends", peers, ("https://data.example.org/set",), model=InvitedModel(10**9, 4, 2_000))
    terms = InvitationTerms(time.time() + 86_400, 1, "Ada")
    return LINK + to_code(invite(OWNER, RunId("1" * 64), terms, places, seed=bytes(32)))


def picture(rows: tuple[str, ...], side: int, angle: float = 0.0) -> np.ndarray:
    """The code in grey levels, in the middle of a square picture, turned by so many degrees."""
    code = np.array([[0 if cell == "1" else 255 for cell in row] for row in rows], dtype=np.uint8)
    code = np.pad(code, 4, constant_values=255)
    turn, centre = np.deg2rad(angle), (side - 1) / 2
    down, right = np.mgrid[0:side, 0:side] - centre
    scale = len(code) / side * (1 if angle == 0 else 1.2)
    y = np.rint((down * np.cos(turn) - right * np.sin(turn)) * scale + (len(code) - 1) / 2).astype(int)
    x = np.rint((down * np.sin(turn) + right * np.cos(turn)) * scale + (len(code) - 1) / 2).astype(int)
    is_inside = (y >= 0) & (y < len(code)) & (x >= 0) & (x < len(code))
    grey = np.full((side, side), 200, dtype=np.uint8)
    grey[is_inside] = code[y[is_inside], x[is_inside]]
    return grey


def png(grey: np.ndarray) -> bytes:
    """A PNG file of grey levels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    height, width = grey.shape
    rows = b"".join(b"\0" + row.tobytes() for row in grey)
    head = struct.pack("!2I5B", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def film(grey: np.ndarray) -> bytes:
    """A YUV4MPEG film for the browser's false camera: first nothing, then the picture."""
    height, width = grey.shape
    colours = bytes([128]) * (height // 2 * (width // 2) * 2)
    frames = [np.full_like(grey, 90)] * FRAMES + [grey] * FRAMES
    head = f"YUV4MPEG2 W{width} H{height} F10:1 Ip A1:1 C420jpeg\n".encode()
    return head + b"".join(b"FRAME\n" + frame.tobytes() + colours for frame in frames)


def payload(name: str, data: bytes, kind: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": data}


@contextmanager
def at_invitation(page_of: OpenPage, folder: Path) -> Iterator[Page]:
    """The page of the wizard that takes an invitation."""
    wizard = SetupApi(folder / "node", is_given=False, port=free_port(), now=time.time())
    with wizard.served() as address:
        page = page_of(address, excused="422")  # what is no invitation is refused
        press(page, "Join with an invitation")
        heading(page, "Join with an invitation")
        yield page
        page.goto("about:blank")


def test_a_picture_of_the_code_is_read_and_any_other_picture_is_explained(tmp_path: Path, open_page: OpenPage) -> None:
    address, rows = link(), qr_rows(link())
    with at_invitation(open_page, tmp_path) as page:
        expect(page.get_by_role("button", name="Scan a QR code")).to_have_count(0)  # this computer has no camera
        field, chooser = page.get_by_label("Invitation", exact=True), page.locator("input[type=file]")
        for side, angle in ((600, 0.0), (900, 10.0), (3000, 0.0)):
            chooser.set_input_files(payload("code.png", png(picture(rows, side, angle))))
            expect(field).to_have_value(address)
            field.fill("")
        chooser.set_input_files(payload("run-invite.svg", qr_svg(address), "image/svg+xml"))
        expect(field).to_have_value(address)
        chooser.set_input_files(payload("empty.png", png(np.full((300, 300), 120, dtype=np.uint8))))
        expect(page.get_by_role("alert")).to_contain_text("no readable QR code")
        check_page(page)
        chooser.set_input_files(payload("damaged.png", png(picture(rows, 600))[:500]))
        expect(page.get_by_role("alert")).to_contain_text("cannot open this picture")
        chooser.set_input_files(payload("other.png", png(picture(qr_rows("https://example.org/menu"), 400))))
        expect(field).to_have_value("https://example.org/menu")
        press(page, "Show the invitation")
        expect(page.get_by_role("alert")).to_be_visible()
        chooser.set_input_files(payload("code.png", png(picture(rows, 600))))
        expect(field).to_have_value(address)
        press(page, "Show the invitation")
        heading(page, "Join the run friends?")


@contextmanager
def camera(page_of: OpenPage, folder: Path, seen: np.ndarray) -> Iterator[Visits]:
    """A browser whose camera sees nothing first, and then this."""
    file = folder / "camera.y4m"
    file.write_bytes(film(seen))
    arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", f"--use-file-for-fake-video-capture={file}"]
    path = chromium_path()
    browser = page_of.browser.browser_type.launch(executable_path=path, args=[*arguments, "--disable-dev-shm-usage"])
    visits = Visits(browser)
    yield visits
    visits.close()
    browser.close()
    assert visits.unexpected_complaints() == []


def tracks(page: Page) -> list[str]:
    """States of the tracks of the camera's picture that was shown last."""
    page.evaluate("window.shown = document.querySelector('video') ?? window.shown")
    states: list[str] = page.evaluate("(window.shown.srcObject?.getTracks() ?? []).map((track) => track.readyState)")
    return states


def until_tracks(page: Page, wanted: list[str]) -> None:
    deadline = time.monotonic() + 30
    while tracks(page) != wanted:
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def test_a_camera_reads_the_code_and_is_off_afterwards(tmp_path: Path, open_page: OpenPage) -> None:
    code = np.pad(picture(qr_rows(link()), 700), ((10, 10), (290, 290)), constant_values=60)
    with camera(open_page, tmp_path, code) as browser, at_invitation(browser, tmp_path) as page:
        page.context.grant_permissions(["camera"])
        page.get_by_role("button", name="Scan a QR code").click()
        expect(page.get_by_label("Camera picture")).to_be_visible()
        tracks(page)
        expect(page.get_by_label("Invitation", exact=True)).not_to_have_value("", timeout=60_000)
        expect(page.get_by_label("Camera picture")).to_have_count(0)
        until_tracks(page, ["ended"])
        press(page, "Show the invitation")
        heading(page, "Join the run friends?")


def test_a_camera_that_is_closed_or_forbidden_is_left_alone(tmp_path: Path, open_page: OpenPage) -> None:
    nothing = np.full((480, 640), 120, dtype=np.uint8)
    with camera(open_page, tmp_path, nothing) as browser, at_invitation(browser, tmp_path) as page:
        page.context.grant_permissions([])  # none: the browser refuses
        page.get_by_role("button", name="Scan a QR code").click()
        expect(page.get_by_role("alert")).to_contain_text("may not use the camera")
        check_page(page)
        page.context.grant_permissions(["camera"])
        page.get_by_role("button", name="Close the camera").click()
        expect(page.get_by_role("alert")).to_have_count(0)
        page.get_by_role("button", name="Scan a QR code").click()
        until_tracks(page, ["live"])
        check_page(page)
        page.get_by_role("button", name="Close the camera").click()
        until_tracks(page, ["ended"])
        expect(page.get_by_label("Invitation", exact=True)).to_have_value("")

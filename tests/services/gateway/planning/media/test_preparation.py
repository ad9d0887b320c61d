"""From URLs of images, videos and audio to what stands in a prompt, with the real decoders."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, ConfigError, InvalidRequestError
from paceline.core.media import MediaKind
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.budget import MemoryBudget, RequestBudget
from paceline.services.gateway.planning.media.items import Expansions, MediaItem, TokenRun
from paceline.services.gateway.planning.media.loader import MediaService
from paceline.services.gateway.planning.media.preparation import MediaPreparer
from paceline.services.gateway.planning.media.processors.base import Processor
from tests.services.gateway.planning.media.samples import audio_file, data_url, image_file, picture, video_file

IMAGE = MediaItem("image", data_url(image_file()))
NAMED = MediaItem("image", data_url(image_file()), "cat")
RECALLED = MediaItem("image", None, "cat")


@pytest.fixture
async def service() -> AsyncIterator[MediaService]:
    made = MediaService(GatewayConfig(media_processes=1))
    yield made
    await made.close()


@pytest.fixture
def preparer(processor: Processor, service: MediaService) -> MediaPreparer:
    return MediaPreparer(GatewayConfig(limit_mm_per_prompt='{"image": 2}'), processor, service)


@pytest.fixture
def budget() -> Iterator[RequestBudget]:
    with MemoryBudget(1 << 30, 1).request() as budget:
        yield budget


async def prepare(
    preparer: MediaPreparer,
    *items: MediaItem,
    owner: str = "",
    most_tokens: int | None = None,
    keeps_newest: bool = False,
    **options: Any,
) -> Expansions:
    with MemoryBudget(1 << 30, 1).request() as budget:
        media = await preparer.plan(
            items,
            lambda media: media,
            budget=budget,
            options=options,
            owner=owner,
            most_tokens=most_tokens,
            keeps_newest=keeps_newest,
        )
        # The files and the decoded arrays count no longer, the inputs do. Items without data have those of others.
        assert budget.used == sum({id(expansion): expansion.size for expansion in media.values()}.values())
        return media


def runs(media: Expansions, item: MediaItem) -> list[TokenRun]:
    return [piece for piece in media[item].pieces if isinstance(piece, TokenRun)]


async def test_all_kinds_of_media_become_inputs(preparer: MediaPreparer, processor: Processor) -> None:
    video = MediaItem("video", data_url(video_file()))
    audio = MediaItem("audio", data_url(audio_file()))
    media = await prepare(preparer, IMAGE, video, audio, videos_kwargs={"num_frames": 4})
    shapes = {IMAGE: (4, 6, 3), video: (4, 16, 32, 3), audio: (8000,)}
    for item, shape in shapes.items():
        assert processor.tokens_of(item.kind, shape) == sum(run.input.length for run in runs(media, item))
    assert [run.input.kind for run in runs(media, IMAGE)] == [MediaKind.IMAGE]
    assert [run.input.kind for run in runs(media, video)] == [MediaKind.VIDEO_FRAME] * 4
    # The sample has 20 frames in two seconds.
    stamps = [piece for piece in media[video].pieces if isinstance(piece, str)]
    assert stamps == ["00:00 ", " 00:00 ", " 00:01 ", " 00:01 "]
    assert [run.input.kind for run in runs(media, audio)] == [MediaKind.AUDIO]


async def test_a_uuid_recalls_an_item_for_its_owner_alone(preparer: MediaPreparer) -> None:
    sent = await prepare(preparer, NAMED, owner="a")
    assert (await prepare(preparer, RECALLED, owner="a"))[RECALLED] == sent[NAMED]
    for owner, options in (("b", {}), ("a", {"max_soft_tokens": 70})):
        with pytest.raises(InvalidRequestError, match="no image with the uuid 'cat' is kept"):
            await prepare(preparer, RECALLED, owner=owner, **options)


async def test_a_uuid_means_the_item_that_was_sent_last_in_the_same_request(
    preparer: MediaPreparer, processor: Processor
) -> None:
    other = MediaItem("image", data_url(image_file(image=picture(9, 9))), "cat")
    for sent in (NAMED, other):  # first the uuid is unknown, then it means another image
        media = await prepare(preparer, sent, RECALLED)
        assert media[RECALLED] == media[sent]
    assert (await prepare(preparer, RECALLED))[RECALLED] == media[other]
    # In front of the data, it means what was kept before.
    before = await prepare(preparer, RECALLED, NAMED)
    assert (before[RECALLED], before[NAMED] == before[RECALLED]) == (media[other], False)
    assert (await prepare(preparer, RECALLED))[RECALLED] == before[NAMED]


async def test_the_last_item_of_a_request_keeps_the_uuid(processor: Processor, service: MediaService) -> None:
    preparer = MediaPreparer(GatewayConfig(), processor, service)
    other = MediaItem("image", data_url(image_file(image=picture(9, 9))), "cat")
    media = await prepare(preparer, NAMED, other, NAMED, RECALLED)
    assert media[RECALLED] == media[NAMED] != media[other]
    assert (await prepare(preparer, RECALLED))[RECALLED] == media[NAMED]


async def test_a_uuid_that_means_two_items_of_a_request_is_refused(processor: Processor, service: MediaService) -> None:
    preparer = MediaPreparer(GatewayConfig(), processor, service)
    other = MediaItem("image", data_url(image_file(image=picture(9, 9))), "cat")
    with pytest.raises(InvalidRequestError, match=r"^image 4: the uuid 'cat' means another image earlier") as caught:
        await prepare(preparer, NAMED, RECALLED, other, RECALLED)
    assert caught.value.param == "messages"
    # The same image is no other one, although it was sent again.
    await prepare(preparer, NAMED)
    await prepare(preparer, RECALLED, NAMED, RECALLED)


async def test_an_error_of_the_request_itself_comes_before_anything_is_loaded(
    preparer: MediaPreparer, budget: RequestBudget
) -> None:
    dead = MediaItem("image", "http://127.0.0.1:1/cat.png")

    def fail(media: Expansions) -> None:
        assert not media[dead].pieces
        raise InvalidRequestError("too long", "messages")

    with pytest.raises(InvalidRequestError, match="too long"):
        await preparer.plan([dead], fail, budget=budget, options=None, owner="")


async def test_errors_name_the_item_and_the_field(preparer: MediaPreparer, budget: RequestBudget) -> None:
    broken = MediaItem("image", data_url(b"GIF89a"))
    with pytest.raises(MediaError, match=r"^image 2: ") as caught:
        await preparer.plan([IMAGE, broken], lambda media: media, budget=budget, options=None, owner="", param="input")
    assert caught.value.param == "input"
    placed = dataclasses.replace(broken, place="messages[0].content[1]")
    with pytest.raises(MediaError, match=r"^messages\[0\]\.content\[1\]: ") as caught:
        await prepare(preparer, IMAGE, placed)
    assert caught.value.param == placed.place
    for wrong, told in (
        (RECALLED, "no image with the uuid 'cat' is kept here"),
        (
            MediaItem("image", "http://127.0.0.1:1/\ud800"),
            "a URL must have .* no control characters or lone surrogates",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=f"^image 2: {told}") as refused:
            await prepare(preparer, IMAGE, wrong)
        assert refused.value.param == "messages"
    with pytest.raises(InvalidRequestError, match=r"at most 2 of the kind image \(--limit-mm-per-prompt\), this one"):
        await prepare(preparer, IMAGE, IMAGE, IMAGE)


async def test_the_error_of_an_item_that_comes_twice_names_the_first_place(
    processor: Processor, service: MediaService
) -> None:
    preparer = MediaPreparer(GatewayConfig(), processor, service)
    broken = MediaItem("image", data_url(b"GIF89a"))
    with pytest.raises(MediaError, match=r"^image 1: "):
        await prepare(preparer, broken, IMAGE, broken)


async def test_all_items_count_however_they_are_sent(processor: Processor, service: MediaService) -> None:
    preparer = MediaPreparer(GatewayConfig(max_media_items=3), processor, service)
    await prepare(preparer, NAMED, NAMED, NAMED)
    with pytest.raises(InvalidRequestError, match=r"at most 3 images.* \(--max-media-items\), this one has 4"):
        await prepare(preparer, NAMED, RECALLED, RECALLED, RECALLED)


async def test_a_model_without_encoders_has_no_options(service: MediaService) -> None:
    preparer = MediaPreparer(GatewayConfig(), None, service)
    assert not await prepare(preparer)
    with pytest.raises(InvalidRequestError, match="takes text alone"):
        await prepare(preparer, max_soft_tokens=70)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"limit_mm_per_prompt": "{"}, "--limit-mm-per-prompt is not valid JSON"),
        ({"limit_mm_per_prompt": '{"picture": 1}'}, "--limit-mm-per-prompt must give counts of image, video, audio"),
        ({"mm_processor_kwargs": "5"}, "--mm-processor-kwargs must be a JSON object"),
        ({"mm_processor_kwargs": '{"size": 5}'}, "--mm-processor-kwargs is wrong: .*no option 'size'"),
    ],
)
async def test_wrong_options_end_the_start(
    options: dict[str, str], told: str, processor: Processor, service: MediaService
) -> None:
    with pytest.raises(ConfigError, match=told):
        MediaPreparer(GatewayConfig(**options), processor, service)


async def test_the_servers_options_hold_for_requests_without_their_own(
    processor: Processor, service: MediaService
) -> None:
    preparer = MediaPreparer(GatewayConfig(mm_processor_kwargs='{"max_soft_tokens": 70}'), processor, service)
    (run,) = runs(await prepare(preparer, IMAGE), IMAGE)
    assert run.input.length <= 70


async def test_an_item_that_no_context_has_room_for_is_refused_before_its_pixels_are_touched(
    preparer: MediaPreparer, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = processor.tokens_of("image", (4, 6, 3))
    other = MediaItem("image", data_url(image_file("BMP")))
    media = await prepare(preparer, IMAGE, other, most_tokens=2 * tokens)
    assert [run.input.length for item in (IMAGE, other) for run in runs(media, item)] == [tokens] * 2
    with pytest.raises(InvalidRequestError, match=rf"it has at least {tokens} tokens for the model, and the items bef"):
        await prepare(preparer, IMAGE, other, most_tokens=2 * tokens - 1)
    monkeypatch.setattr(type(processor), "fit", None)
    with pytest.raises(InvalidRequestError, match=r"^image 1: it has at least .* the longest context has 9; send a"):
        await prepare(preparer, IMAGE, most_tokens=9)


async def test_audio_is_decoded_up_to_what_the_model_takes(preparer: MediaPreparer) -> None:
    long = MediaItem("audio", data_url(audio_file(np.zeros(31 * 8000, np.float32), 8000)))
    with pytest.raises(MediaError, match=r"more than 30\.1 seconds \(the most that this model takes\)"):
        await prepare(preparer, long)


async def test_preprocessing_has_a_deadline() -> None:
    service = MediaService(GatewayConfig(media_processes=1, media_decode_seconds=0.1))
    go_on = threading.Event()
    with pytest.raises(BusyError, match="are being prepared"):
        await service.preprocess(go_on.wait, 10)
    go_on.set()
    await service.close()


def images(count: int) -> list[MediaItem]:
    """Return different images."""
    return [MediaItem("image", data_url(image_file(image=picture(6 + index, 4)))) for index in range(count)]


async def test_the_newest_items_are_kept_as_far_as_there_is_room(processor: Processor, service: MediaService) -> None:
    preparer = MediaPreparer(GatewayConfig(max_media_items=12), processor, service)
    items = images(14)
    tokens = [processor.tokens_of("image", (4, 6 + index, 3)) for index in range(14)]
    assert set(await prepare(preparer, *items, keeps_newest=True)) == set(items[2:])
    # More items than are loaded at the same time.
    kept = await prepare(preparer, *items, keeps_newest=True, most_tokens=sum(tokens[-9:]))
    assert list(kept) == items[:-10:-1]
    assert not await prepare(preparer, *items, keeps_newest=True, most_tokens=tokens[-1] - 1)
    # What has no room may be wrong, whether it is loaded beside others or not.
    dead, unknown = MediaItem("image", "http://127.0.0.1:1/cat.png"), MediaItem("image", None, "dog")
    for wrong in (dead, unknown):
        media = await prepare(preparer, wrong, *items[:3], keeps_newest=True, most_tokens=sum(tokens[:3]))
        assert set(media) == set(items[:3])
    with pytest.raises(MediaError, match=r"^image 1: "):
        await prepare(preparer, dead, *items[:3], keeps_newest=True)
    with pytest.raises(InvalidRequestError, match=r"^image 1: no image with the uuid 'dog' is kept"):
        await prepare(preparer, unknown, *items[:3], keeps_newest=True)


async def test_the_newest_items_are_kept_within_the_limits_of_their_kinds(preparer: MediaPreparer) -> None:
    first, second, third = images(3)
    audio = MediaItem("audio", data_url(audio_file()))
    assert set(await prepare(preparer, audio, first, second, third, keeps_newest=True)) == {second, third}
    assert set(await prepare(preparer, audio, second, third, keeps_newest=True)) == {audio, second, third}


async def test_a_repeated_uuid_has_the_data_of_an_older_item_that_is_left_out(preparer: MediaPreparer) -> None:
    first, second = images(2)
    media = await prepare(preparer, NAMED, first, RECALLED, second, keeps_newest=True)
    assert (media[RECALLED], first in media) == (media[NAMED], False)
    # The uuid alone is kept from earlier requests, too.
    again = await prepare(preparer, first, second, RECALLED, keeps_newest=True)
    assert (again[RECALLED], set(again)) == (media[NAMED], {second, RECALLED})


async def test_a_stored_uuid_never_means_another_item(preparer: MediaPreparer) -> None:
    meant = (await prepare(preparer, NAMED))[NAMED].digest
    stored = MediaItem("image", None, "cat", meant)
    assert (await prepare(preparer, stored))[stored].digest == meant
    await prepare(preparer, MediaItem("image", data_url(image_file(image=picture(9, 9))), "cat"))
    with pytest.raises(InvalidRequestError, match="'cat' means another image now than when this part was stored; send"):
        await prepare(preparer, stored)
    other = MediaItem("image", data_url(image_file(image=picture(8, 8))), "cat")
    with pytest.raises(InvalidRequestError, match="means another image now"):
        await prepare(preparer, other, stored)
    assert (await prepare(preparer, NAMED, stored))[stored].digest == meant

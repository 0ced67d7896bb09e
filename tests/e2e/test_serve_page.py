"""The live page in a real browser, without a screen."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from servers import MODEL, serving

sync_api = pytest.importorskip("playwright.sync_api")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:  # type: ignore[name-defined]
    """Chromium: the system's, or the one that `playwright install chromium` brings."""
    found = next((path for path in map(shutil.which, BROWSERS) if path is not None), None)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            if found is not None:
                raise
            pytest.skip(
                "no browser here: install chromium (Debian: `apt-get install chromium`, elsewhere: `playwright install "
                f"chromium`): {str(error).splitlines()[0]}"
            )
        yield browser
        browser.close()


def new_page(browser: "sync_api.Browser") -> tuple["sync_api.Page", list[str]]:  # type: ignore[name-defined]
    """A page that has the key, and what goes wrong on it."""
    page = browser.new_context(http_credentials={"username": "", "password": "s3cret!"}).new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    return page, problems


def wait_for(page: "sync_api.Page", condition: str) -> None:  # type: ignore[name-defined]
    # Playwright's own waiting evaluates text within the page, which the page's policy forbids.
    deadline = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"{condition} never held; the page shows: {page.text_content('body')}"
        page.wait_for_timeout(50)


def test_the_page_shows_what_the_server_does(browser: "sync_api.Browser") -> None:  # type: ignore[name-defined]
    with serving(max_model_len=64, api_key="s3cret!", idle=False) as served:
        page, problems = new_page(browser)
        page.goto(served.url)
        wait_for(page, "document.getElementById('state').textContent === 'serving'")
        assert page.text_content("#model") == MODEL
        assert page.text_content("#requests") == "0"
        assert page.text_content("#ttft td") == "–"

        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                served.complete(prompt=[1] * 20, max_tokens=30, n=4, slo={"ttft_ms": 1e6})
                while served.engine.stats.num_running:  # else the page counts these beside the next
                    time.sleep(0.001)

        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            loading = pool.submit(load)
            stack.callback(stop.set)
            wait_for(page, "document.getElementById('running').textContent === '4'")
            wait_for(page, "Number(document.getElementById('tokens').textContent.replaceAll(',', '')) > 0")
            # Without a GPU, the lanes' shares of the device's time.
            wait_for(page, "Number(document.getElementById('sms-decode').textContent) > 0.05")
            wait_for(page, "document.querySelector('#sms .decode').getAttribute('points').split(' ').length > 3")
            # A line that has left the bottom of its chart.
            heights = page.eval_on_selector(
                "#sms .decode", "line => line.getAttribute('points').split(' ').map(p => Number(p.split(',')[1]))"
            )
            assert 2 <= min(heights) < 95
            wait_for(page, "document.querySelectorAll('#tpot td')[2].textContent !== '–'")
            p50, p90, p99 = (float(cell.replace(",", "")) for cell in page.locator("#ttft td").all_text_contents())
            assert 0 < p50 <= p90 <= p99
            assert page.text_content("#slo") == "100.0 %"
            assert page.text_content("#queue-most") == "4"
            wait_for(page, "parseFloat(document.getElementById('prefixes').textContent) > 50")
            assert "solo" in str(page.text_content("#policies"))
        loading.result(30)
        wait_for(page, "document.getElementById('running').textContent === '0'")
        assert problems == []

        served.engine.fail("the device is gone")
        wait_for(page, "document.getElementById('state').className === 'bad'")
        assert page.text_content("#state") == "the device is gone"
        page.context.close()


def test_the_api_is_described_and_can_be_tried(browser: "sync_api.Browser") -> None:  # type: ignore[name-defined]
    with serving(max_model_len=64, api_key="s3cret!") as served:
        page, problems = new_page(browser)
        page.on("request", lambda request: problems.extend([] if served.url in request.url else [request.url]))
        page.goto(f"{served.url}/docs")
        wait_for(page, "document.querySelectorAll('details').length > 7")
        part = page.locator("details", has_text="POST /tokenize")
        part.locator("summary").click()
        assert "add_special_tokens" in part.inner_text()
        page.locator("#key").fill("s3cret!")
        part.locator("textarea").fill('{"prompt": "The sea"}')
        part.locator("button").click()
        wait_for(page, "[...document.querySelectorAll('pre')].some(pre => pre.textContent)")
        assert '"max_model_len":64' in part.locator("pre").inner_text()
        assert problems == []
        page.context.close()

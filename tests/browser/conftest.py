"""One JupyterLab and one Chromium for all browser tests, and a notebook and a kernel for each test.

All end with this folder: playwright keeps an event loop running, and later tests need their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import nbformat
import pytest

from tests import python_programs
from tests.browser.explored import SET_UP
from tests.browser.lab import Kernels, Lab
from tests.browser.pages import MARK_AS_FIRST, Pages
from tests.needs import need

REPOSITORY = pathlib.Path(__file__).parents[2]
# A kernel before ipykernel 7.4.0 may never read one of its first requests (ipykernel issue 1554).
UNANSWERED_MS = 20_000


def python_path(*folders: pathlib.Path) -> str:
    """A PYTHONPATH with these folders before those that it has."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab in folders of its own, with this checkout importable in its kernels."""
    base = tmp_path_factory.mktemp("lab")
    environment = dict(os.environ, HOME=str(base), PYTHONPATH=python_path(REPOSITORY))
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        environment[f"JUPYTER_{name}"] = str(base / name.lower())
    for name in ("SETTINGS_DIR", "WORKSPACES_DIR"):
        environment[f"JUPYTERLAB_{name}"] = str(base / name.lower())
    environment |= {"IPYTHONDIR": str(base / "ipython"), "JUPYTER_PATH": str(base / "share")}
    # The question whether to fetch news covers the notebook until it is answered.
    settings = base / "settings_dir" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    (base / "root").mkdir()
    startup = base / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "packages.py").write_text(f"[__import__(name) for name in {python_programs.KERNEL}]")
    kernels = base / "share" / "kernels"
    forks = fork_kernels(base, environment, kernels) if python_programs.IS_SUPPORTED else None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--LabApp.expose_app_in_browser=True"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--ServerApp.root_dir={base / 'root'}", f"--IdentityProvider.token={token}"]
    log = base / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
        else:
            pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
        yield Lab(url, token, base / "root", kernels, base / "settings_dir")
    finally:
        for process in filter(None, [server, forks]):
            process.terminate()
            process.wait(120)


def fork_kernels(base: pathlib.Path, environment: dict[str, str], kernels: pathlib.Path) -> subprocess.Popen[bytes]:
    """Start the process that forks the kernels named python3, and specify these; return the process."""
    path = str(base / "forks")
    process = python_programs.serve(path, python_programs.KERNEL, env=environment, cwd=base)
    python_programs.specify_kernel(kernels, path)
    return process


def specify_kernel(kernels: pathlib.Path, name: str, command: list[str], environment: dict[str, str]) -> None:
    """Write the specification of a kernel that is started by a command followed by its connection file."""
    specification = {
        "argv": [*command, "{connection_file}"],
        "display_name": name,
        "language": "python",
        "env": environment,
    }
    (kernels / name).mkdir(parents=True)
    (kernels / name / "kernel.json").write_text(json.dumps(specification))


@pytest.fixture(scope="package")
def kernels(lab: Lab) -> Iterator[Kernels]:
    """The kernels of the notebooks."""
    kernels = Kernels(lab)
    yield kernels
    kernels.close()


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """A headless Chromium."""
    path = os.environ.get("MEMEXPLORE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    need(path is not None, "no chromium on this machine: install it, or name it in MEMEXPLORE_CHROMIUM")
    need(importlib.util.find_spec("playwright"), "playwright is not installed: pip install playwright")
    from playwright import sync_api

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    arguments += ["--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def old_kernel(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The name of a kernel with an older ipykernel, installed over the packages of this environment."""

    def install(version: str) -> str:
        name = f"ipykernel-{version}"
        if (lab.kernels / name).exists():
            return name
        packages = tmp_path_factory.mktemp(name)
        # Only these two differ: all other packages come from this environment.
        wanted = [f"ipykernel=={version}", "nest-asyncio>=1.4"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), "--no-deps", *wanted]
        uv = ["uv", "pip", "install", "--quiet", "--python", sys.executable, "--target", str(packages), "--no-deps"]
        has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0
        installed = subprocess.run(pip if has_pip else [*uv, *wanted], capture_output=True, text=True)
        need(installed.returncode == 0, f"ipykernel {version} cannot be installed: {installed.stderr[-500:]}")
        environment = {"PYTHONPATH": python_path(packages, REPOSITORY)}
        specify_kernel(lab.kernels, name, [sys.executable, "-m", "ipykernel_launcher", "-f"], environment)
        return name

    return install


class Notebook:
    """One notebook, open in its own browser tab."""

    CURRENT = "const app = window.jupyterapp, panel = app.shell.currentWidget;"
    READY = f"""() => {{ {CURRENT.replace("app.", "app?.")}
        return panel?.context?.isReady && panel.sessionContext.session?.kernel?.status === 'idle' }}"""
    OPEN = f"() => {{ {CURRENT.replace('app.', 'app?.')} return panel?.context?.isReady }}"

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name

    def open(self) -> Notebook:
        """Load the page and wait for the kernel."""
        self.page.goto(f"{self.lab.url}/lab/tree/{self.name}?token={self.lab.token}&reset")
        self.page.wait_for_function(self.READY, timeout=180_000)
        return self

    def open_in_page(self) -> Notebook:
        """Open the notebook in the JupyterLab that the page shows, and wait for the kernel."""
        self.page.evaluate("name => window.jupyterapp.commands.execute('docmanager:open', { path: name })", self.name)
        self.page.wait_for_function(
            f"name => {{ {self.CURRENT} return panel?.context?.path === name && ({self.READY})() }}", arg=self.name
        )
        return self

    def open_with_old_kernel(self) -> Notebook:
        """Load the page and wait for an old kernel; start another one if the first does not answer."""
        self.open_without_kernel()
        is_answered = self.page.evaluate(
            f"""timeout => {{
                const ready = {self.READY}, sleep = milliseconds => new Promise(done => setTimeout(done, milliseconds));
                const ask = async () => {{
                    while (!ready()) await sleep(100);
                    {self.CURRENT}
                    await panel.sessionContext.session.kernel.requestExecute({{ code: '1' }}).done;
                    return true;
                }};
                return Promise.race([ask(), sleep(timeout).then(() => false)]) }}""",
            UNANSWERED_MS,
        )
        if not is_answered:
            self.lab.end_kernel(self.name)
            self.open()
        return self

    def open_without_kernel(self) -> Notebook:
        """Load the page again without waiting for a kernel."""
        self.page.goto(f"{self.lab.url}/lab/tree/{self.name}?token={self.lab.token}&reset")
        self.page.wait_for_function(self.OPEN, timeout=60_000)
        return self

    def start(self, number: int) -> None:
        """Start one cell without waiting for its end."""
        self.page.evaluate(
            f"""number => {{ {self.CURRENT}
                panel.content.activeCellIndex = number; app.commands.execute('notebook:run-cell') }}""",
            number,
        )

    def run(self, number: int) -> None:
        """Run one cell and wait for its end."""
        self.start(number)
        self.wait(number)

    def run_all(self) -> None:
        """Run all cells and wait for the last one."""
        kinds = self.page.evaluate(f"() => {{ {self.CURRENT} return panel.content.widgets.map(c => c.model.type) }}")
        self.page.evaluate(f"() => {{ {self.CURRENT} app.commands.execute('notebook:run-all-cells') }}")
        for number, kind in enumerate(kinds):
            if kind == "code":
                self.wait(number)

    def wait(self, number: int, timeout: float = 120_000) -> None:
        """Wait until a cell has run."""
        self.page.wait_for_function(
            f"""number => {{ {self.CURRENT} const model = panel.content.widgets[number].model;
                return model.executionState === 'idle' && model.executionCount !== null }}""",
            arg=number,
            timeout=timeout,
        )

    def sources(self) -> list[str]:
        """The text of each code cell."""
        return self.page.evaluate(
            f"""() => {{ {self.CURRENT} return panel.content.widgets.filter(c => c.model.type === 'code')
                .map(c => c.model.sharedModel.getSource()) }}"""
        )

    def outputs(self, number: int) -> list[dict[str, Any]]:
        """The outputs of a cell as the notebook would save them."""
        return self.page.evaluate(
            f"number => {{ {self.CURRENT} return panel.content.widgets[number].model.outputs.toJSON() }}", number
        )

    def text(self, number: int) -> str:
        """Return the printed output of a cell."""
        return "".join("".join(output.get("text", "")) for output in self.outputs(number))

    def errors(self) -> list[str]:
        """The exceptions in all cells."""
        outputs = self.page.evaluate(
            f"() => {{ {self.CURRENT} return panel.content.widgets.flatMap(c => c.model.outputs?.toJSON() ?? []) }}"
        )
        return [f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error"]

    def save(self) -> None:
        """Write the notebook to its file."""
        self.page.evaluate(f"() => {{ {self.CURRENT} return panel.context.save() }}")

    def state(self, number: int) -> str:
        """Whether a cell is `running` or `idle`."""
        return self.page.evaluate(
            f"number => {{ {self.CURRENT} return panel.content.widgets[number].model.executionState }}", number
        )

    def interrupt(self) -> None:
        """Interrupt the kernel, as the stop button does."""
        self.page.evaluate(f"() => {{ {self.CURRENT} return panel.sessionContext.session.kernel.interrupt() }}")

    def settle(self) -> None:
        """Wait until no view on the page is busy."""
        # `wait_for_function` takes the promise of an async function for true.
        self.page.evaluate(
            """async () => {
                const busy = () => document.querySelector('.memexplore[aria-busy=true]');
                const end = Date.now() + 60_000;
                for (let quiet = 0; quiet < 5; quiet = busy() ? 0 : quiet + 1) {
                    if (Date.now() > end) throw new Error('a view is still busy');
                    await new Promise(done => setTimeout(() => requestAnimationFrame(done), 40));
                } }"""
        )

    def shut_down(self) -> None:
        """Leave the page, then end the kernel.

        A kernel that exits may interleave the parts of two messages, because its threads write to the socket without
        its output thread: JupyterLab then throws "Kernel message validation error" about `stream.stderr`.
        """
        self.page.goto("about:blank")
        self.lab.end_kernel(self.name)


_LATE = "[anywidget] Failed to initialize model."
"""anywidget 0.11 reports a model that took more than 2 s, as one in a background page does while another page loads on
a slow machine. A test waits for what its page shows, so a view that never comes fails it all the same."""


_OF_CLOSED = re.compile("(Error: )?(Disposed|Canceled future for )")
"""JupyterLab's errors about requests of a document that an earlier test left open, and that was closed since."""


@pytest.fixture(scope="package")
def pages(chromium: Any) -> Iterator[Pages]:
    """The pages of the tests."""
    pages = Pages(chromium)
    yield pages
    pages.close()


@pytest.fixture
def own_page() -> None:
    """Open the notebook of the test in a page that no other test has: it has not loaded plotly.js yet."""


_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note whether a test passed, for its fixtures."""
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def notebook(
    lab: Lab, kernels: Kernels, pages: Pages, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Notebook]]:
    """A function that opens a notebook of the given cells, or a copy of a notebook file, in the test's page."""
    # JupyterLab keeps the theme that an earlier test has chosen.
    (lab.settings / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings").unlink(missing_ok=True)
    is_own = "own_page" in request.fixturenames
    page = pages.take(is_fresh=is_own)
    problems: list[str] = []
    is_loaded = page.url.startswith(lab.url)

    def note(error: object) -> None:
        if str(error) != _LATE and not (is_loaded and _OF_CLOSED.match(str(error))):
            problems.append(str(error))

    page.on("pageerror", note)
    opened: list[Notebook] = []

    def make(*cells: str, file: pathlib.Path | None = None, kernel: str = "python3") -> Notebook:
        document = nbformat.v4.new_notebook() if file is None else nbformat.read(file, as_version=4)
        document.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
        document.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
        name = f"{request.node.originalname}-{secrets.token_hex(3)}.ipynb"
        nbformat.write(document, lab.root / name)
        opened.append(Notebook(page, lab, name))
        if kernel != "python3":
            return opened[-1].open_with_old_kernel()
        kernels.give(name)
        opened[-1].open_in_page() if is_loaded and len(opened) == 1 else opened[-1].open()
        if len(opened) == 1:
            page.evaluate(MARK_AS_FIRST)
        kernels.prepare()
        return opened[-1]

    yield make
    # JupyterLab rejects the requests of a document that is closed while they wait.
    page.remove_listener("pageerror", note)
    pages.give_back(page, is_reusable=request.node.stash.get(_PASSED, False) and not (problems or is_own))
    for book in opened:
        kernels.end(book.name)
    assert not problems, problems


@pytest.fixture
def explored(notebook: Callable[..., Any]) -> Any:
    """A notebook that shows an explorer, and a cell that resets its knobs."""
    book = notebook(SET_UP, "explorer", "explorer.knobs = mx.Knobs()", "print(explorer.knobs)")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    return book

"""Check the dashboards against the types that Grafana publishes, with TypeScript's compiler: `make check-grafana`.

This needs npm, and npm's registry the first time; packages are installed into ~/.cache/hitherto, not into the checkout.
checked.json gets a hash of each dashboard that passed, so that `make test` finds a dashboard that was not checked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from .dashboards import ALL, texts

SCHEMA, COMPILER = "@grafana/schema@13.2.3", "typescript@5.9.3"
NOTE = Path(__file__).parent / "checked.json"
FOLDER = Path.home() / ".cache" / "hitherto" / "grafana-schema"
COMPOSABLE = "@grafana/schema/dist/esm/raw/composable"
# The library declares values as enums; in JSON they are their texts.
HEAD = f"""
import type {{ Dashboard, FieldConfigSource, Panel, RowPanel }} from '@grafana/schema';
import type * as Stat from '{COMPOSABLE}/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as TimeSeries from '{COMPOSABLE}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as StateTimeline from '{COMPOSABLE}/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';

type Json<T> = T extends string ? `${{T}}` : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Json<U>[] : T extends object ? {{ [K in keyof T]: Json<T[K]> }} : T;
type With<Type extends string, Options, Custom> = Omit<Json<Panel>, 'type' | 'options' | 'fieldConfig' | 'targets'> & {{
  type: Type; options: Json<Options>; targets: Target[];
  fieldConfig: Omit<Json<FieldConfigSource>, 'defaults'> & {{
    defaults: Omit<Json<FieldConfigSource['defaults']>, 'custom'> & {{ custom: Json<Custom> }} }};
}};
// The query of Prometheus' own plug-in, which the library has no longer.
interface Target {{
  datasource: {{ type: string; uid: string }}; editorMode: 'code'; expr: string; legendFormat: string; range: boolean;
  refId: string;
}}
type AnyPanel = (Omit<Json<RowPanel>, 'type'> & {{ type: 'row' }}) | With<'stat', Stat.Options, Record<string, never>>
  | With<'timeseries', TimeSeries.Options, TimeSeries.FieldConfig>
  | With<'state-timeline', StateTimeline.Options, StateTimeline.FieldConfig>;
type Checked = Omit<Json<Dashboard>, 'panels'> & {{ panels: AnyPanel[] }};
"""


def install() -> None:
    if not shutil.which("npm"):
        sys.exit("npm is needed (Debian: apt-get install npm); without it nothing is checked")
    FOLDER.mkdir(parents=True, exist_ok=True)
    done = ("node_modules/@grafana/schema/package.json", "node_modules/typescript/package.json")
    if not all((FOLDER / path).exists() for path in done):
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(FOLDER), SCHEMA, COMPILER]
        subprocess.run(command, check=True, cwd=FOLDER)
    for path, wanted in zip(done, (SCHEMA, COMPILER), strict=True):
        version = json.loads((FOLDER / path).read_text())["version"]
        if version != wanted.rpartition("@")[2]:
            shutil.rmtree(FOLDER / "node_modules")
            install()


def compiled() -> subprocess.CompletedProcess[str]:
    source = HEAD + "".join(
        f"export const {name.replace('-', '_')}: Checked = {json.dumps(one.json(), indent=1)};\n"
        for name, one in ALL.items()
    )
    (FOLDER / "dashboards.ts").write_text(source)
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    compiler = FOLDER / "node_modules" / ".bin" / "tsc"
    command = [str(compiler), *flags, "dashboards.ts"]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)


def main() -> int:
    install()
    done = compiled()
    if done.returncode:
        print(done.stdout + done.stderr)
        return 1
    files = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts().items()}
    NOTE.write_text(json.dumps({"against": SCHEMA.replace("@1", " 1"), "files": files}, indent=1) + "\n")
    print(f"{len(files)} dashboards are as {SCHEMA} has them")
    return 0


if __name__ == "__main__":
    sys.exit(main())

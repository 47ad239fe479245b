// Compile Python's library, so that a browser does not compile it at each start: 2.6 s of 4.5 s.
//
// The packages of npm have it as source. It is compiled by the Python that will import it, in Node.
// The result depends on nothing but the source. It has no docstrings, which saves 0.6 MB.

import { readFileSync, writeFileSync } from "node:fs";
import { loadPyodide } from "pyodide";

const COMPILE = `
import io, zipfile
from importlib._bootstrap_external import _code_to_hash_pyc
from importlib.util import source_hash

def compiled(source):
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(".py"):
                code = compile(data, name, "exec", dont_inherit=True, optimize=2)
                name, data = name + "c", _code_to_hash_pyc(code, source_hash(data), False)
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            new.writestr(info, data)
    return result.getvalue()
`;

const library = "node_modules/pyodide/python_stdlib.zip";
const python = await loadPyodide();
python.runPython(COMPILE);
const source = python.toPy(new Uint8Array(readFileSync(library)));
const compiled = python.runPython("lambda source: compiled(source.tobytes())")(source);
writeFileSync("python_stdlib.zip", compiled.toJs());

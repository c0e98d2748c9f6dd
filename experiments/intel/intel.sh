set -x
C=$1
mkdir -p /opt/mkl && tar xJf .mklcarry/mkl.tar.xz -C /opt/mkl && echo /opt/mkl > /etc/ld.so.conf.d/mkl.conf && ldconfig && ldconfig -p | grep mkl_rt
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 LD_LIBRARY_PATH=/opt/mkl
python3 -c "from stage0_serial import mkl; print(mkl.library_path()); mkl.load()"
timeout 200 taskset -c 0,1 python3 -m benchmarks.cpu.train_step --rounds 4 --no-compile --save --commit $C > $OUT/intel_step.txt 2>&1; tail -30 $OUT/intel_step.txt | cut -c1-170
timeout 110 taskset -c 0,1 python3 -m benchmarks.cpu.decode --rounds 3 --save --commit $C > $OUT/intel_decode.txt 2>&1; tail -34 $OUT/intel_decode.txt | cut -c1-170
timeout 130 taskset -c 0,1 python3 -m benchmarks.ranks.ranks --ranks 2 --rounds 3 --save --commit $C > $OUT/intel_ranks.txt 2>&1; tail -14 $OUT/intel_ranks.txt | cut -c1-170
tar czf $OUT/results.tgz results

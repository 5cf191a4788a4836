#!/bin/bash
# The part of the virtual machine that happens outside of it; vm.py starts it and says what it is for.
#
#   vm.sh kernel CACHE             prints the directory of kernel and modules, in CACHE; gets them if need be
#   vm.sh run KERNEL SCRATCH       becomes the machine; what it reports comes out of standard output
#
# CACHE: a directory that is kept. KERNEL: what `vm.sh kernel` has printed. SCRATCH: a directory with `settings` for
# vm_init.sh; the machine's console will be in it.
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin
step=$1
shift

# In the order in which they are loaded: the PCI bus, the files of outside (9p), and what lies over them.
modules=(virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci
    netfs fscache 9pnet 9pnet_virtio 9p overlay)

# --- Debian's kernel, taken out of its package and not installed --------------------------------------------------------

if [[ $step == kernel ]]; then
    cache=$1
    # Not the smaller one for clouds, which has no 9p. Depends: linux-image-6.1.0-57-amd64 (= 6.1.192-3)
    depends=$(apt-cache show --no-all-versions linux-image-amd64 | sed -nE 's/^Depends: (\S+) \(= (\S+)\).*/\1=\2/p')
    [[ -n $depends ]] || { echo 'linux-image-amd64 does not say which kernel it depends on' >&2 && exit 1; }
    kept=$cache/$depends-$(cksum <"$0" | tr ' ' -) # another script may make another thing of it
    if [[ ! -d $kept ]]; then
        mkdir -p "$cache"
        rm -rf "$cache"/linux-image-* # those before it
        new=$(mktemp --directory "$cache/new.XXXXXXXX")
        trap 'rm -rf "$new"' EXIT
        mkdir "$new/kept"
        (cd "$new" && apt-get -qq -o APT::Sandbox::User=root download "$depends") >&2
        dpkg-deb --fsys-tarfile "$new"/*.deb | tar --extract --directory="$new/kept" --no-anchored --wildcards \
            --transform='s|.*/||;s|^vmlinuz-.*|packed|' 'vmlinuz-*' "${modules[@]/%/.ko}"
        # It would unpack itself, at an emulated processor's speed.
        at=$(LC_ALL=C grep --only-matching --byte-offset --text --perl-regexp '\xfd7zXZ\x00' "$new/kept/packed" |
            LC_ALL=C sed --quiet '1s/:.*//p')
        xz --decompress --single-stream < <(tail --bytes=+$((at + 1)) "$new/kept/packed") >"$new/kept/vmlinux"
        rm "$new/kept/packed"
        mv --no-target-directory "$new/kept" "$kept" || [[ -d $kept ]] # somebody else was quicker
    fi
    echo "$kept"
    exit
fi

# --- the machine ------------------------------------------------------------------------------------------------------

kernel=$1 scratch=$2
first=$scratch/first # its first root directory, in memory
mkdir -p "$first"/{bin,modules,proc,sys,dev,outside,memory,root}
busybox=$(command -v busybox)
cp "$busybox" "$first/bin/busybox"
while read -r library; do # none, if it is that of busybox-static
    cp --parents "$library" "$first"
done < <(ldd "$busybox" 2>/dev/null | grep --only-matching '/[^ ]*')
number=10
for module in "${modules[@]}"; do
    cp "$kernel/$module.ko" "$first/modules/$((number++))-$module.ko"
done
cp "$scratch/settings" "$first/"
cp "${0%/*}/vm_init.sh" "$first/init"
chmod 0755 "$first/init"
(cd "$first" && find . | cpio --quiet --create --format=newc) >"$scratch/initrd"

# Emulated, as not every machine can virtualize. All processors in one thread: several would mostly wait for each other.
# The kernel is to say, check and randomize little: it is emulated, too. No disk and no network; the files of outside can
# be read and not written.
exec qemu-system-x86_64 -accel tcg,thread=single -cpu max -smp 3 -m 1024 -nodefaults -nic none -display none -no-reboot \
    -kernel "$kernel/vmlinux" -initrd "$scratch/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr norandmaps apparmor=0 audit=0 tsc=reliable" \
    -virtfs local,path=/,mount_tag=outside,security_model=none,readonly=on,multidevs=remap \
    -serial "file:$scratch/console" -serial file:/dev/stdout
